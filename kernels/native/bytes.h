// y = x W^T + b where W has bytes or four bits a weight, and x is rounded to bytes on the way.
//
// Both sides of a product are whole numbers then, and one instruction multiplies four bytes a lane and
// adds them to a sum.
//
//     x       rounded once a call (byte_rows.h): bytes and a scale a group
//     panel   LANES rows of W beside one another, four neighbours of each a lane; what is stored is
//             turned (int8) or unfolded (int4) into it, once for all rows of x
//     sums    of a group: whole numbers, exact;  times the scales, added up in float32
//
// The instruction takes bytes without a sign from one side. W's are those: int8 plus 128, int4 plus
// what its table says (int4.h). What that adds is the same for all rows of W, and is taken off.
//
// A result depends on W's row and x's row alone, not on how many rows there are nor on the threads.

#pragma once

#include <algorithm>
#include <vector>

#include "byte_rows.h"
#include "floats.h"
#include "int4.h"
#include "linear.h"
#include "pool.h"

namespace polyhost {

constexpr int PANELS = 2;  // in work at once

// int8 [n, k] with a scale a row.
struct Int8Rows {
  static constexpr int RUN = 1, HEADS = 0;
  static constexpr bool GROUP_SCALES = false, HALVES = false, ZEROS = false;

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

constexpr int PANEL_COLUMNS = 1024;   // of W, that stay in the first caches while x passes
// Of x rounded, that is passed before the next rows of W: as much as the second cache holds well.
constexpr int64_t ROUNDED_BYTES = 512 * 1024;
constexpr int WIDEST = LANES == 16 ? 6 : 4;  // rows of x in a tile

struct PanelRoom {
  alignas(64) uint8_t bytes[PANELS][PANEL_COLUMNS * LANES];
  alignas(64) float scales[PANELS][PANEL_COLUMNS / GROUP * 2 * LANES];
};

// totals [ROWS of x][PANELS * LANES] += the products of `groups` groups from x's group `first` on.
template <class Kind, int ROWS>
inline void panel_tile(const PanelRoom& room, const ByteRows& x, int surplus, int64_t t,
                       int64_t first, int groups, float* totals) {
  constexpr int SUMS = Kind::HALVES ? 2 : 1, STEPS = QUADS / SUMS;
  constexpr int RUN = WHOLE_BYTES || Kind::RUN > STEPS ? STEPS : Kind::RUN;
  Vec total[PANELS][ROWS];
  for (int r = 0; r < ROWS; r++)
    for (int p = 0; p < PANELS; p++) total[p][r] = load(totals + (r * PANELS + p) * LANES);
  for (int g = 0; g < groups; g++) {
    Ints sums[PANELS][ROWS][SUMS];
    const int8_t* values = x.values + (t * x.groups + first + g) * GROUP;
    for (int part = 0; part < QUADS / RUN; part++) {
      Ints run[PANELS][ROWS];
      for (auto& of_panel : run)
        for (Ints& v : of_panel) v = fill_ints(0);
#pragma GCC unroll 1  // unrolled, all products are kept in memory before they are added
      for (int q = part * RUN; q < (part + 1) * RUN; q++) {
        Ints w[PANELS];
        for (int p = 0; p < PANELS; p++)
          w[p] = load_ints(room.bytes[p] + (g * QUADS + q) * QUAD_BYTES);
        for (int r = 0; r < ROWS; r++) {
          int32_t four;
          std::memcpy(&four, values + r * x.groups * GROUP + 4 * q, 4);
          Ints v = fill_ints(four);
          for (int p = 0; p < PANELS; p++) run[p][r] = add_run(run[p][r], w[p], v);
        }
      }
      for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PANELS; p++) {
          Ints& sum = sums[p][r][part * RUN / STEPS];
          Ints made = sum_of_run(run[p][r]);
          sum = part * RUN % STEPS == 0 ? made : add_ints(sum, made);
        }
    }
    for (int r = 0; r < ROWS; r++) {
      int64_t at = (t + r) * x.groups + first + g;
      Vec scale = fill(x.scale[at]);
      for (int p = 0; p < PANELS; p++)
        total[p][r] = add_group<Kind>(total[p][r], sums[p][r], x.total + 2 * at, surplus,
                                      room.scales[p] + g * Kind::HEADS * LANES, scale);
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int p = 0; p < PANELS; p++) store(totals + (r * PANELS + p) * LANES, total[p][r]);
}

template <class Kind, int ROWS>
inline void panel_tiles(int rows, const PanelRoom& room, const ByteRows& x, int surplus, int64_t t,
                        int64_t first, int groups, float* totals) {
  if (rows == ROWS) {
    panel_tile<Kind, ROWS>(room, x, surplus, t, first, groups, totals);
  } else if constexpr (ROWS > 1) {
    panel_tiles<Kind, ROWS - 1>(rows, room, x, surplus, t, first, groups, totals);
  }
}

// Rows [row, row + ...) of y: of two panels that follow one another, or of gate's and up's. As
// finish_row has it, with what is the same for all rows of x loaded once.
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
    if (activation != NONE) a = mul(activate(a, activation), b);
    put_lanes(out, t_begin + t, row[0], rows[0], op.bias ? add(a, bias[0]) : a);
    if (activation == NONE && rows[1])
      put_lanes(out, t_begin + t, row[1], rows[1], op.bias ? add(b, bias[1]) : b);
  }
}

template <class Kind>
inline void byte_piece(const Linear& op, int activation, const ByteRows& x, int64_t t_begin,
                       int64_t t_end, int n_begin, int n_end, const Output& out) {
  thread_local PanelRoom room;
  thread_local std::vector<float> totals;
  int64_t count = t_end - t_begin;
  int surplus = Kind::GROUP_SCALES ? op.surplus : 128;  // int8 as bytes without a sign
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
        panel_tiles<Kind, WIDEST>(int(end - t), room, x, surplus, t_begin + t, at / GROUP,
                                  groups, totals.data() + t * PANELS * LANES);
        t = end;
      }
    }
    finish(op, activation, out, t_begin, count, row, rows, totals.data());
  }
}

// x [num_rows, k] as bytes, in room of the caller's thread that holds until its next call.
inline ByteRows round_rows(Pool& pool, const bf16* x, int64_t num_rows, int k) {
  thread_local std::vector<int8_t> values;
  thread_local std::vector<float> scales;
  thread_local std::vector<int32_t> totals;
  int64_t groups = (k + GROUP - 1) / GROUP;
  if (int64_t(scales.size()) < num_rows * groups) {
    values.resize(size_t(num_rows * groups) * GROUP);
    scales.resize(size_t(num_rows * groups));
    totals.resize(size_t(num_rows * groups) * 2);
  }
  int8_t* q = values.data();
  float* scale = scales.data();
  int32_t* total = totals.data();
  // A few rows are done before another thread has woken up.
  int64_t few = std::max<int64_t>(8, num_rows / (4 * pool.num_threads()));
  auto some = [&](int number) {
    int64_t end = std::min(num_rows, (number + 1) * few);
    for (int64_t t = number * few; t < end; t++)
      round_row(x + t * k, k, q + t * groups * GROUP, scale + t * groups, total + t * groups * 2);
  };
  pool.each(int((num_rows + few - 1) / few), some);
  return {q, scale, total, groups};
}

// Rows [n_begin, n_end) of y for rows [t_begin, t_end) of x; n_begin a multiple of `rows_of_step`.
template <class Kind>
inline void byte_rows_piece(const Linear& op, int activation, const ByteRows& x, int64_t t_begin,
                            int64_t t_end, int n_begin, int n_end, const Output& out) {
  if constexpr (Kind::GROUP_SCALES) {
    if (t_end - t_begin <= FEW_BYTE_ROWS)
      return few_blocks_piece<Kind>(op, activation, x, t_begin, int(t_end - t_begin), n_begin,
                                    n_end, out);
  }
  byte_piece<Kind>(op, activation, x, t_begin, t_end, n_begin, n_end, out);
}

// What pieces are multiples of: whole blocks of int4, and two panels.
inline int64_t rows_of_step(int activation) {
  return activation == NONE ? PANELS * LANES : std::max(16, LANES);
}

// Rows of W in a piece.
template <class Kind>
inline int rows_of_piece(const Linear& op, int activation) {
  int64_t step = rows_of_step(activation);
  int64_t bytes = Kind::panel_bytes(op.k) * (step / LANES) * (activation == NONE ? 1 : 2);
  return int(std::min<int64_t>(std::max<int64_t>(PIECE_BYTES / bytes, 1) * step, op.n));
}

// Rows of x that pass before the next rows of W.
inline int64_t rounded_at_once(int k) { return std::max<int64_t>(8, ROUNDED_BYTES / k / 8 * 8); }

template <class Kind>
inline void byte_linear(Pool& pool, const Linear& op, int activation, const bf16* x,
                        int64_t num_rows, const Output& out) {
  ByteRows rounded = round_rows(pool, x, num_rows, op.k);
  int64_t x_rows = rounded_at_once(op.k), x_blocks = (num_rows + x_rows - 1) / x_rows;
  int rows = rows_of_piece<Kind>(op, activation), n_blocks = (op.n + rows - 1) / rows;
  auto piece = [&](int number) {
    int64_t block = number / x_blocks, x_block = number % x_blocks;
    int n_begin = int(block * rows), n_end = std::min(op.n, n_begin + rows);
    int64_t t_begin = x_block * x_rows, t_end = std::min(num_rows, t_begin + x_rows);
    byte_rows_piece<Kind>(op, activation, rounded, t_begin, t_end, n_begin, n_end, out);
  };
  pool.each_in_order(int(n_blocks * x_blocks), piece);
}

// Whether int8 weights are multiplied with x rounded: where the build has whole bytes, for any number
// of rows (bench.cpu: faster than floats from one row on, and so a row's results do not depend on
// how many there are), or never.
enum Rounding { BY_BUILD = 0, NEVER = 1 };

// f(a kind) where weights of that format are multiplied as bytes; whether they are.
template <class F>
inline bool as_bytes(int format, Rounding rounding, F f) {
  switch (format) {
    case INT4: f(Int4Plain{}); return true;
    case INT4_ZEROS: f(Int4Zeros{}); return true;
    case INT4_TABLE: f(Int4Table{}); return true;
    case INT4_HALVES: f(Int4Halves{}); return true;
    case INT4_WIDE: f(Int4Wide{}); return true;
  }
  if constexpr (WHOLE_BYTES) {
    if (format == INT8 && rounding != NEVER) {
      f(Int8Rows{});
      return true;
    }
  }
  return false;
}

inline void linear(Pool& pool, const Linear& op, int activation, const bf16* x, int64_t num_rows,
                   const Output& out, Rounding rounding = BY_BUILD) {
  if (num_rows <= 0) return;
  auto bytes = [&](auto kind) {
    byte_linear<decltype(kind)>(pool, op, activation, x, num_rows, out);
  };
  if (as_bytes(op.format, rounding, bytes)) return;
  if (op.format == INT8) return float_linear<Bytes>(pool, op, activation, x, num_rows, out);
  float_linear<Brief>(pool, op, activation, x, num_rows, out);
}

}  // namespace polyhost
