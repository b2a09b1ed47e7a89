// y = x W^T + b with x as it is: weights in bfloat16, or int8 that is widened.
//
// Up to FEW rows of x: few_rows.h. More of them: a register has a lane for each, and W's values are
// spread over the lanes one after another as the arena has them, so that W is never turned.
//
//     strip   LANES rows of x, widened and turned once a call (strips.h)
//     panel   LANES rows of W by up to WIDE_COLUMNS, widened where the first cache has them, once
//             for all strips; the next panel's lines are asked for while this one is multiplied
//     sums    a register a row of W and strip, float32
//
// Where one instruction adds up products of pairs of bfloat16 (the build for AVX-512 BF16) a lane has
// a pair in place of a widened value; the rest is the same.
//
// The order of a sum, and so its last bits, depends on how many rows of x there are and on the row's
// place among them, and on nothing else: neither on the threads nor on what other rows hold.

#pragma once

#include <algorithm>

#include "few_rows.h"
#include "linear.h"
#include "pool.h"
#include "strips.h"

namespace polyhost {

constexpr int WIDE_COLUMNS = 128;  // of W
constexpr int WIDE_STRIDE = WIDE_COLUMNS + 16;  // floats between a panel's rows

// Rows of W, widened; what lies behind the last row or column is zero.
template <class Kind>
struct WidePanel {
  using Weight = typename Kind::Weight;
  alignas(64) float values[LANES * WIDE_STRIDE];

  void fill(const Weight* w, int k, int rows, int count) {
    for (int i = 0; i < LANES; i++) {
      float* to = values + i * WIDE_STRIDE;
      const Weight* p = w + int64_t(i) * k;
      int whole = i < rows ? count / PAIRS * PAIRS : 0;
      for (int at = 0; at < whole; at += PAIRS, to += Kind::VECS * LANES) put(p + at, to);
      for (int at = whole; at < count || at % CHUNK; at += PAIRS, to += Kind::VECS * LANES)
        put(Padded<Weight, PAIRS>(p + at, i < rows ? std::max(0, count - at) : 0).values, to);
    }
  }

  static void put(const Weight* p, float* to) {
    Vec wide[Kind::VECS];
    Kind::load(p, wide);
    for (int v = 0; v < Kind::VECS; v++) store(to + v * LANES, wide[v]);
  }
};

// sums [NUM][LANES rows of W, LANES] of ROWS rows += the products with NUM strips that follow one
// another, `strip_floats` apart, over `chunks` chunks.
template <class Kind, int ROWS, int SPREAD, int NUM, bool ASK>
inline void tile(const float* panel, const float* x, int64_t strip_floats, int chunks,
                 float* totals, const char* ahead) {
  constexpr int STEPS = CHUNK / Kind::COLUMNS / SPREAD;
  constexpr int LINES = LANES * CHUNK * int(sizeof(typename Kind::Weight)) / 64;  // of a chunk
  constexpr int ROUNDS = std::min(LINES, STEPS);
  Vec sums[ROWS][NUM];
  for (int r = 0; r < ROWS; r++)
    for (int s = 0; s < NUM; s++) sums[r][s] = load(totals + (s * LANES + r) * LANES);
  for (int chunk = 0; chunk < chunks; chunk++) {
#pragma GCC unroll 1
    for (int round = 0; round < ROUNDS; round++) {
      if constexpr (ASK) {
        for (int line = 0; line < LINES / ROUNDS; line++) {
          _mm_prefetch(ahead, _MM_HINT_T1);
          ahead += 64;
        }
      }
      for (int step = 0; step < STEPS / ROUNDS; step++) {
        Vec right[NUM];
        for (int s = 0; s < NUM; s++) right[s] = load(x + s * strip_floats);
        for (int r = 0; r < ROWS; r++) {
          Vec left = spread<SPREAD>(panel + r * WIDE_STRIDE);
          for (int s = 0; s < NUM; s++) sums[r][s] = Kind::multiply(sums[r][s], left, right[s]);
        }
        panel += SPREAD;
        x += LANES;
      }
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int s = 0; s < NUM; s++) store(totals + (s * LANES + r) * LANES, sums[r][s]);
}

template <class Kind, int SPREAD>
inline void whole_tile(const float* panel, const float* x, int chunks, float* totals, bool ask,
                       const char* ahead) {
  if (ask) {
    tile<Kind, LANES, SPREAD, 1, true>(panel, x, 0, chunks, totals, ahead);
  } else {
    tile<Kind, LANES, SPREAD, 1, false>(panel, x, 0, chunks, totals, ahead);
  }
}

// One panel against all strips; `at`: its first column. The first strips ask for what is ahead.
template <class Kind>
inline void panel_times_strips(const WidePanel<Kind>& panel, const Strips& strips, int at, int chunks,
                               float* totals, const char* ahead) {
  constexpr int HALF = LANES / 2;
  int64_t place = at / Kind::COLUMNS;
  for (int i = 0; i < strips.count;) {
    const Strip& strip = strips.all[i];
    float* sums = totals + int64_t(i) * LANES * LANES;
    const float* x = strip.values + place / strip.spread * LANES;
    bool ask = i == 0;
    if (strip.spread == 1 && i + 1 < strips.count && strips.all[i + 1].spread == 1) {
      // Two at once, half of the rows after the other: fewer loads a product.
      int64_t apart = strips.places * LANES;
      if (ask) {
        tile<Kind, HALF, 1, 2, true>(panel.values, x, apart, chunks, sums, ahead);
      } else {
        tile<Kind, HALF, 1, 2, false>(panel.values, x, apart, chunks, sums, ahead);
      }
      tile<Kind, HALF, 1, 2, false>(panel.values + HALF * WIDE_STRIDE, x, apart, chunks,
                                    sums + HALF * LANES, ahead);
      i += 2;
      continue;
    }
    if (strip.spread == 1) whole_tile<Kind, 1>(panel.values, x, chunks, sums, ask, ahead);
    if (strip.spread == 2) whole_tile<Kind, 2>(panel.values, x, chunks, sums, ask, ahead);
    if (strip.spread == 4) whole_tile<Kind, 4>(panel.values, x, chunks, sums, ask, ahead);
    i++;
  }
}

// by_token[t] = the sums of LANES rows of W with the strip's row t.
inline void turn_sums(const Strip& strip, const float* totals, Vec* by_token) {
  Pairs in[LANES], turned[LANES];
  for (int i = 0; i < LANES; i++) in[i] = bits_of(load(totals + i * LANES));
  transpose(in, turned);
  for (int t = 0; t < strip.rows; t++) {
    by_token[t] = of_bits(turned[t * strip.spread]);
    for (int s = 1; s < strip.spread; s++)
      by_token[t] = add(by_token[t], of_bits(turned[t * strip.spread + s]));
  }
}

// Rows [n_begin, n_end) of y against a block of x.
template <class Kind>
inline void float_piece(const Linear& op, int activation, const Strips& strips, int n_begin,
                        int n_end, const Output& out) {
  thread_local WidePanel<Kind> panel;
  thread_local Room<float> room;
  using Weight = typename Kind::Weight;
  const auto* weight = static_cast<const Weight*>(op.weight);
  const int parts = activation == NONE ? 1 : 2;
  const int num_panels = (op.k + WIDE_COLUMNS - 1) / WIDE_COLUMNS;
  const int columns = ((op.k + num_panels - 1) / num_panels + CHUNK - 1) / CHUNK * CHUNK;
  const int64_t part_floats = int64_t(strips.count) * LANES * LANES;
  float* totals = room.of(2 * part_floats);
  for (int n = n_begin; n < n_end; n += LANES) {
    int rows = std::min(LANES, n_end - n);
    std::memset(totals, 0, size_t(parts * part_floats) * sizeof(float));
    for (int part = 0; part < parts; part++) {
      const Weight* w = weight + (int64_t(part) * op.n + n) * op.k;
      for (int at = 0; at < op.k; at += columns) {
        int count = std::min(columns, op.k - at);
        panel.fill(w + at, op.k, rows, count);
        // As much of the next LANES rows as this panel is, in the order in which they lie.
        const Weight* ahead = w + int64_t(LANES) * (op.k + at);
        panel_times_strips(panel, strips, at, (count + CHUNK - 1) / CHUNK,
                           totals + part * part_floats, reinterpret_cast<const char*>(ahead));
      }
    }
    for (int i = 0; i < strips.count; i++) {
      const Strip& strip = strips.all[i];
      Vec sums[LANES], ups[LANES];
      turn_sums(strip, totals + int64_t(i) * LANES * LANES, sums);
      if (parts == 2) turn_sums(strip, totals + part_floats + int64_t(i) * LANES * LANES, ups);
      for (int t = 0; t < strip.rows; t++)
        finish_row(op, activation, out, strip.t + t, n, rows, sums[t], parts == 2 ? ups[t] : zero());
    }
  }
}

template <class Kind>
inline void times_block(Pool& pool, const Linear& op, int activation, const bf16* x,
                        const Strips& strips, const Output& out) {
  int parts = (op.k + WIDE_COLUMNS - 1) / WIDE_COLUMNS;
  int padded = (op.k + CHUNK - 1) / CHUNK * CHUNK;
  auto fill = [&](int number) {
    int begin = number % parts * WIDE_COLUMNS;
    fill_strip<Kind>(strips.all[number / parts], x, op.k, begin,
                     std::min(padded, begin + WIDE_COLUMNS));
  };
  pool.each(strips.count * parts, fill);
  int64_t row_bytes = int64_t(op.k) * int64_t(sizeof(typename Kind::Weight));
  int rows = int(std::max<int64_t>(PIECE_BYTES / 4 / row_bytes, 1) + LANES - 1) / LANES * LANES;
  auto piece = [&](int number) {
    int begin = number * rows, end = std::min(op.n, begin + rows);
    if (strips.all[0].spread == LANES) {
      few_rows_piece<Kind>(op, activation, strips, begin, end, out);
    } else {
      float_piece<Kind>(op, activation, strips, begin, end, out);
    }
  };
  pool.each_in_order((op.n + rows - 1) / rows, piece);
}

template <class Kind>
inline void float_linear(Pool& pool, const Linear& op, int activation, const bf16* x,
                         int64_t num_rows, const Output& out) {
  thread_local Room<float> room;
  int64_t places = (op.k + CHUNK - 1) / CHUNK * CHUNK / Kind::COLUMNS;
  int64_t fitting = STRIPS_BYTES / (places * int64_t(sizeof(float))) / (2 * LANES) * 2 * LANES;
  int64_t block = std::clamp<int64_t>(fitting, 2 * LANES, (MAX_STRIPS - 2) * LANES);
  block = std::min(block, num_rows);
  float* values = room.of((block + LANES) * places);
  for (int64_t t = 0; t < num_rows; t += block) {
    Strips strips(t, std::min(num_rows, t + block), places, values);
    times_block<Kind>(pool, op, activation, x, strips, out);
  }
}

}  // namespace polyhost
