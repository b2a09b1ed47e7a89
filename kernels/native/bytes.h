// y = x W^T + b where W has bytes or four bits a weight, and x is rounded to bytes on the way.
//
// Both sides of a product are whole numbers then, and one instruction multiplies four bytes a lane and
// adds them to a sum. Each GROUP of 32 neighbours in a row of x has a scale of its own (its largest
// value is 127 of it), so that one large activation costs its neighbours their precision and nobody
// else.
//
//     x       rounded once a call: bytes, a scale and a start a group
//     panel   LANES rows of W beside one another, four neighbours of each a lane; what is stored is
//             turned (int8) or unfolded (int4) into it, once for all rows of x
//     sums    of a group: whole numbers, exact;  times the scales, added up in float32
//
// The instruction takes bytes without a sign from one side. W's are those: int8 plus 128, int4 as it is
// stored, which is plus 8. What that adds is the same for all rows of W: sums start with minus that.
//
// A result depends on W's row and x's row alone, not on how many rows there are nor on the threads.
//
// A group of x with NaN or infinity in it has a scale of NaN, and makes its row's results NaN.

#pragma once

#include <algorithm>
#include <vector>

#include "floats.h"
#include "linear.h"
#include "pool.h"

namespace polyhost {

constexpr int GROUP = 32;              // neighbours of x, and of an int4 weight, that share a scale
constexpr int QUADS = GROUP / 4;       // steps of a panel in a group
constexpr int QUAD_BYTES = 4 * LANES;  // of a panel: a step
constexpr int PANELS = 2;              // in work at once
constexpr float TINY = 1e-30f;         // groups below are zeros: 127 over them is no float

// Rows of x as bytes.
struct ByteRows {
  const int8_t* values;  // [T, groups * GROUP], zero behind the end
  const float* scale;    // [T, groups]
  const int32_t* start;  // [T, groups]: what sums begin with
  int64_t groups;
};

// A row of k values. `surplus`: what W's bytes have too much.
inline void round_row(const bf16* x, int k, int surplus, int8_t* values, float* scale,
                      int32_t* start) {
  constexpr int PARTS = GROUP / LANES;
  for (int at = 0, g = 0; at < k; at += GROUP, g++) {
    bf16 end[GROUP] = {};
    const bf16* p = x + at;
    if (at + GROUP > k) {
      std::memcpy(end, p, size_t(k - at) * sizeof(bf16));
      p = end;
    }
    Vec v[PARTS], top = zero(), broken = zero();
    for (int i = 0; i < PARTS; i++) {
      v[i] = load_bf16(p + i * LANES);
      top = maximum(top, maximum(v[i], sub(zero(), v[i])));
      broken = fma(v[i], zero(), broken);
    }
    float most = largest(top), nothing = sum(broken);
    bool fine = nothing == 0.0f && most > TINY;
    Vec by = fill(fine ? 127.0f / most : 0.0f);
    Ints total = fill_ints(0);
    for (int i = 0; i < PARTS; i++) {
      Ints q = fine ? nearest_ints(mul(v[i], by)) : fill_ints(0);
      total = add_ints(total, q);
      store_int8(values + at + i * LANES, q);
    }
    scale[g] = fine ? most / 127.0f : nothing;
    start[g] = -surplus * sum_ints(total);
  }
}

// int8 [n, k] with a scale a row.
struct Int8Rows {
  static constexpr int SURPLUS = 128;
  static constexpr bool GROUP_SCALES = false;

  static int64_t panel_bytes(int k) { return int64_t(LANES) * k; }

  // Rows [row, row + rows), columns [at, at + count) as a panel; zeros behind the end.
  // As much as that is asked for further on, in the order in which it lies.
  static void fill_panel(const Linear& op, int row, int rows, int at, int count, uint8_t* panel,
                         float*) {
    const Ints sign = fill_ints(int32_t(0x80808080u));
    const int8_t* w = static_cast<const int8_t*>(op.weight) + int64_t(row) * op.k + at;
    const int8_t* ahead = w + PANELS * int64_t(LANES) * op.k + (LANES - 1) * int64_t(at);
    for (int c = 0; c < count; c += QUAD_BYTES) {
      for (int i = 0; i < LANES; i++, ahead += QUAD_BYTES)
        if (i % (64 / QUAD_BYTES) == 0)
          _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T1);
      Pairs in[LANES], turned[LANES];
      int there = std::min(QUAD_BYTES, count - c);
      for (int i = 0; i < LANES; i++) {
        const int8_t* p = w + int64_t(i) * op.k + c;
        if (i >= rows) {
          in[i] = fill_ints(0);
        } else if (there == QUAD_BYTES) {
          in[i] = load_ints(p);
        } else {
          int8_t end[QUAD_BYTES] = {};
          std::memcpy(end, p, size_t(there));
          in[i] = load_ints(end);
        }
      }
      transpose(in, turned);
      for (int i = 0; i < LANES; i++)
        store_ints(panel + (c / 4 + i) * QUAD_BYTES, xor_ints(turned[i], sign));
    }
  }
};

// Four bits, a scale a GROUP. Stored in blocks of 16 rows and 64 columns: 16 scales of the first
// group, 16 of the second, then eight lines of 64 bytes, each with eight columns of 16 rows: four
// bytes a row, the first four columns in their lower halves, the others in the upper ones.
struct Int4Blocks {
  static constexpr int SURPLUS = 8;
  static constexpr bool GROUP_SCALES = true;
  static constexpr int ROWS = 16, COLUMNS = 64, LINE = 64;
  static constexpr int BYTES = 2 * ROWS * int(sizeof(bf16)) + COLUMNS / 8 * LINE;
  static constexpr int AHEAD = 8192;  // bytes that are asked for before they are used

  static int64_t panel_bytes(int k) { return int64_t(LANES) * k / 2; }

  // `at` a multiple of COLUMNS. scales [groups, LANES].
  static void fill_panel(const Linear& op, int row, int, int at, int count, uint8_t* panel,
                         float* scales) {
    const Ints low = fill_ints(0x0f0f0f0f);
    int64_t blocks = (op.k + COLUMNS - 1) / COLUMNS;
    const uint8_t* block = static_cast<const uint8_t*>(op.weight) +
                           (row / ROWS * blocks + at / COLUMNS) * BYTES;
    int part = row % ROWS;
    for (int c = 0; c < count; c += COLUMNS, block += BYTES) {
      for (int g = 0; g < COLUMNS / GROUP; g++, scales += LANES)
        store(scales, load_bf16(reinterpret_cast<const bf16*>(block) + g * ROWS + part));
      const uint8_t* line = block + 2 * ROWS * sizeof(bf16) + 4 * part;
      const char* ahead = reinterpret_cast<const char*>(block) + AHEAD;
      for (int i = 0; i < BYTES; i += LINE) _mm_prefetch(ahead + i, _MM_HINT_T1);
      for (int i = 0; i < COLUMNS / 8; i++, line += LINE, panel += 2 * QUAD_BYTES) {
        Ints both = load_ints(line);
        store_ints(panel, and_ints(both, low));
        store_ints(panel + QUAD_BYTES, and_ints(down_ints(both, 4), low));
      }
    }
  }
};

constexpr int PANEL_COLUMNS = 1024;   // of W, that stay in the first caches while x passes
// Of x rounded, that is passed before the next rows of W: as much as the second cache holds well.
constexpr int64_t ROUNDED_BYTES = 512 * 1024;
constexpr int WIDEST = LANES == 16 ? 6 : 4;  // rows of x in a tile

struct PanelRoom {
  alignas(64) uint8_t bytes[PANELS][PANEL_COLUMNS * LANES];
  alignas(64) float scales[PANELS][PANEL_COLUMNS / GROUP * LANES];
};

// totals [ROWS of x][PANELS * LANES] += the products of `groups` groups from x's group `first` on.
template <class Kind, int ROWS>
inline void panel_tile(const PanelRoom& room, const ByteRows& x, int64_t t, int64_t first,
                       int groups, float* totals) {
  Vec total[PANELS][ROWS];
  for (int r = 0; r < ROWS; r++)
    for (int p = 0; p < PANELS; p++) total[p][r] = load(totals + (r * PANELS + p) * LANES);
  for (int g = 0; g < groups; g++) {
    Ints acc[PANELS][ROWS];
    for (int r = 0; r < ROWS; r++) {
      Ints start = fill_ints(x.start[(t + r) * x.groups + first + g]);
      for (int p = 0; p < PANELS; p++) acc[p][r] = start;
    }
    const int8_t* values = x.values + (t * x.groups + first + g) * GROUP;
    for (int q = 0; q < QUADS; q++) {
      Ints w[PANELS];
      for (int p = 0; p < PANELS; p++)
        w[p] = load_ints(room.bytes[p] + (g * QUADS + q) * QUAD_BYTES);
      for (int r = 0; r < ROWS; r++) {
        int32_t four;
        std::memcpy(&four, values + r * x.groups * GROUP + 4 * q, 4);
        Ints v = fill_ints(four);
        for (int p = 0; p < PANELS; p++) acc[p][r] = dot_bytes(acc[p][r], w[p], v);
      }
    }
    for (int r = 0; r < ROWS; r++) {
      Vec scale = fill(x.scale[(t + r) * x.groups + first + g]);
      for (int p = 0; p < PANELS; p++) {
        Vec sums = float_of(acc[p][r]);
        if (Kind::GROUP_SCALES) sums = mul(sums, load(room.scales[p] + g * LANES));
        total[p][r] = fma(sums, scale, total[p][r]);
      }
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int p = 0; p < PANELS; p++) store(totals + (r * PANELS + p) * LANES, total[p][r]);
}

template <class Kind, int ROWS>
inline void panel_tiles(int rows, const PanelRoom& room, const ByteRows& x, int64_t t,
                        int64_t first, int groups, float* totals) {
  if (rows == ROWS) {
    panel_tile<Kind, ROWS>(room, x, t, first, groups, totals);
  } else if constexpr (ROWS > 1) {
    panel_tiles<Kind, ROWS - 1>(rows, room, x, t, first, groups, totals);
  }
}

// Rows [row, row + ...) of y: of two panels that follow one another, or of gate's and up's.
template <class Kind>
inline void finish(const Linear& op, int activation, const Output& out, int64_t t_begin,
                   int64_t count, const int* row, const int* rows, const float* totals) {
  Vec scale[PANELS], bias[PANELS];
  for (int p = 0; p < PANELS; p++) {
    scale[p] = op.scale ? row_values(op.scale, row[p], rows[p]) : fill(1.0f);
    bool biased = op.bias && (p == 0 || activation == NONE);
    bias[p] = biased ? row_values(op.bias, row[p], rows[p]) : zero();
  }
  for (int64_t t = 0; t < count; t++, totals += PANELS * LANES) {
    Vec a = mul(load(totals), scale[0]), b = mul(load(totals + LANES), scale[1]);
    if (activation != NONE) {
      put_lanes(out, t_begin + t, row[0], rows[0], add(mul(activate(a, activation), b), bias[0]));
    } else {
      put_lanes(out, t_begin + t, row[0], rows[0], add(a, bias[0]));
      if (rows[1]) put_lanes(out, t_begin + t, row[1], rows[1], add(b, bias[1]));
    }
  }
}

template <class Kind>
inline void byte_piece(const Linear& op, int activation, const ByteRows& x, int64_t t_begin,
                       int64_t t_end, int n_begin, int n_end, const Output& out) {
  thread_local PanelRoom room;
  thread_local std::vector<float> totals;
  int64_t count = t_end - t_begin;
  int step = activation == NONE ? PANELS * LANES : LANES;
  for (int n = n_begin; n < n_end; n += step) {
    totals.assign(size_t(count) * PANELS * LANES, 0.0f);
    int row[PANELS] = {n, activation == NONE ? n + LANES : op.n + n};
    int rows[PANELS];
    rows[0] = std::min(LANES, n_end - n);
    rows[1] = activation == NONE ? std::clamp(n_end - n - LANES, 0, LANES) : rows[0];
    for (int at = 0; at < op.k; at += PANEL_COLUMNS) {
      int columns = std::min(PANEL_COLUMNS, op.k - at);
      for (int p = 0; p < PANELS; p++)
        if (rows[p])
          Kind::fill_panel(op, row[p], rows[p], at, columns, room.bytes[p], room.scales[p]);
      int groups = (columns + GROUP - 1) / GROUP;
      int64_t tiles = (count + WIDEST - 1) / WIDEST;
      for (int64_t tile = 0, t = 0; tile < tiles; tile++) {
        // As even as can be: 16 are 6, 5 and 5.
        int64_t end = (tile + 1) * count / tiles;
        panel_tiles<Kind, WIDEST>(int(end - t), room, x, t_begin + t, at / GROUP, groups,
                                  totals.data() + t * PANELS * LANES);
        t = end;
      }
    }
    finish<Kind>(op, activation, out, t_begin, count, row, rows, totals.data());
  }
}

template <class Kind>
inline void byte_linear(Pool& pool, const Linear& op, int activation, const bf16* x,
                        int64_t num_rows, const Output& out) {
  thread_local std::vector<int8_t> values;
  thread_local std::vector<float> scales;
  thread_local std::vector<int32_t> starts;
  int64_t groups = (op.k + GROUP - 1) / GROUP;
  if (int64_t(scales.size()) < num_rows * groups) {
    values.resize(size_t(num_rows * groups) * GROUP);
    scales.resize(size_t(num_rows * groups));
    starts.resize(size_t(num_rows * groups));
  }
  int8_t* q = values.data();
  float* scale = scales.data();
  int32_t* start = starts.data();
  // A few rows are done before another thread has woken up.
  int64_t few = std::max<int64_t>(8, num_rows / (4 * pool.num_threads()));
  auto some = [&](int number) {
    int64_t end = std::min(num_rows, (number + 1) * few);
    for (int64_t t = number * few; t < end; t++)
      round_row(x + t * op.k, op.k, Kind::SURPLUS, q + t * groups * GROUP, scale + t * groups,
                start + t * groups);
  };
  pool.each(int((num_rows + few - 1) / few), some);
  ByteRows rounded{q, scale, start, groups};

  int64_t x_rows = std::max<int64_t>(8, ROUNDED_BYTES / op.k / 8 * 8);
  int64_t x_blocks = (num_rows + x_rows - 1) / x_rows;
  int64_t step = activation == NONE ? PANELS * LANES : LANES;
  int64_t rows = PIECE_BYTES / (Kind::panel_bytes(op.k) * PANELS) * step;
  rows = std::min<int64_t>(std::max(rows, step), op.n);
  int n_blocks = int((op.n + rows - 1) / rows);
  auto piece = [&](int number) {
    int64_t block = number / x_blocks, x_block = number % x_blocks;
    int n_begin = int(block * rows), n_end = int(std::min<int64_t>(op.n, n_begin + rows));
    int64_t t_begin = x_block * x_rows, t_end = std::min(num_rows, t_begin + x_rows);
    byte_piece<Kind>(op, activation, rounded, t_begin, t_end, n_begin, n_end, out);
  };
  pool.each_in_order(int(n_blocks * x_blocks), piece);
}

// Whether int8 weights are multiplied with x rounded: where the build has whole bytes, for any number
// of rows (bench.cpu: faster than floats from one row on, and so a row's results do not depend on
// how many there are), or never.
enum Rounding { BY_BUILD = 0, NEVER = 1 };

inline void linear(Pool& pool, const Linear& op, int activation, const bf16* x, int64_t num_rows,
                   const Output& out, Rounding rounding = BY_BUILD) {
  if (num_rows <= 0) return;
  if (op.format == INT4) return byte_linear<Int4Blocks>(pool, op, activation, x, num_rows, out);
  if constexpr (WHOLE_BYTES) {
    if (op.format == INT8 && rounding != NEVER)
      return byte_linear<Int8Rows>(pool, op, activation, x, num_rows, out);
  }
  if (op.format == INT8) return float_linear<Bytes>(pool, op, activation, x, num_rows, out);
  float_linear<Brief>(pool, op, activation, x, num_rows, out);
}

}  // namespace polyhost
