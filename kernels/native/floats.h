// y = x W^T + b with x as it is: weights in bfloat16, or int8 that is widened.
//
// Up to FEW rows of x: few_rows.h. More of them:
//
//     strip   FOURS rows of x, widened and turned once a call (strips.h)
//     panel   LANES rows of W by up to WIDE_COLUMNS, widened where the first cache has them, once
//             for all strips; the next panel's lines are asked for while this one is multiplied
//     sums    a register a row of W and strip, float32; four values of W are spread over its rows of x
//
// Where one instruction adds up products of pairs of bfloat16 (the build for AVX-512 BF16) a lane has
// a pair in place of a widened value; the rest is the same.
//
// The order of a sum, and so its last bits, depends on K and on nothing else: not on how many rows of
// x there are, nor on the row's place among them, nor on the threads.

#pragma once

#include <algorithm>

#include "few_rows.h"
#include "linear.h"
#include "pool.h"
#include "strips.h"

namespace polyhost {

constexpr int WIDE_COLUMNS = 128;  // of W
constexpr int WIDE_STRIDE = WIDE_COLUMNS + 16;  // floats between a panel's rows
constexpr int MOST_STRIPS = LANES / 4;  // in a tile

// Rows of W, widened; what lies behind the last row or column is zero.
template <class Kind>
struct WidePanel {
  using Weight = typename Kind::Weight;
  alignas(64) float values[LANES * WIDE_STRIDE];

  void fill(const Weight* w, int k, int rows, int count) {
    for (int i = 0; i < LANES; i++) {
      float* to = values + i * WIDE_STRIDE;
      const Weight* p = w + int64_t(i) * k;
      int there = i < rows ? count : 0, whole = there / PAIRS * PAIRS;
      for (int at = 0; at < whole; at += PAIRS, to += Kind::VECS * LANES) {
        Vec raw[Kind::RAWS];
        Kind::load(p + at, raw);
        put(raw, to);
      }
      for (int at = whole; at < count || at % CHUNK; at += PAIRS, to += Kind::VECS * LANES) {
        Vec raw[Kind::RAWS];
        load_end<Kind>(p + at, there - at, raw);
        put(raw, to);
      }
    }
  }

  static void put(const Vec* raw, float* to) {
    for (int v = 0; v < Kind::VECS; v++) store(to + v * LANES, Kind::widened(raw, v));
  }
};

// sums [NUM strips][LANES rows of W] += the products of ROWS rows of W with NUM strips that follow one
// another, over `chunks` chunks.
template <class Kind, int ROWS, int NUM, bool ASK>
inline void tile(const float* panel, const float* x, int64_t strip_floats, int chunks,
                 bool first, float* totals, const char* ahead) {
  constexpr int STEPS = CHUNK / Kind::COLUMNS / 4;
  constexpr int LINES = LANES * CHUNK * int(sizeof(typename Kind::Weight)) / 64;  // of a chunk
  constexpr int ROUNDS = std::min(LINES * ROWS / LANES, STEPS);
  Vec sums[ROWS][NUM];
  for (int r = 0; r < ROWS; r++)
    for (int s = 0; s < NUM; s++) sums[r][s] = first ? zero() : load(totals + (s * LANES + r) * LANES);
  for (int chunk = 0; chunk < chunks; chunk++) {
#pragma GCC unroll 1
    for (int round = 0; round < ROUNDS; round++) {
      if constexpr (ASK) {
        for (int line = 0; line < LINES * ROWS / LANES / ROUNDS; line++) {
          _mm_prefetch(ahead, _MM_HINT_T1);
          ahead += 64;
        }
      }
      for (int step = 0; step < STEPS / ROUNDS; step++) {
        Vec right[NUM];
        for (int s = 0; s < NUM; s++) right[s] = load(x + s * strip_floats);
        for (int r = 0; r < ROWS; r++) {
          Vec left = four(panel + r * WIDE_STRIDE);
          for (int s = 0; s < NUM; s++) sums[r][s] = Kind::multiply(sums[r][s], left, right[s]);
        }
        panel += 4;
        x += LANES;
      }
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int s = 0; s < NUM; s++) store(totals + (s * LANES + r) * LANES, sums[r][s]);
}

// `num` strips against all rows of a panel. With `ask` they ask for what is ahead.
template <class Kind, int NUM>
inline void tiles(int num, const float* panel, const float* x, int64_t strip_floats, int chunks,
                  bool first, float* totals, bool ask, const char* ahead) {
  if constexpr (NUM > 1) {
    if (num < NUM)
      return tiles<Kind, NUM - 1>(num, panel, x, strip_floats, chunks, first, totals, ask, ahead);
  }
  constexpr int ROWS = NUM == 1 ? LANES : NUM == 2 ? LANES / 2 : LANES / 4;
  for (int r = 0; r < LANES; r += ROWS, panel += ROWS * WIDE_STRIDE, totals += ROWS * LANES) {
    if (ask) {
      tile<Kind, ROWS, NUM, true>(panel, x, strip_floats, chunks, first, totals, ahead);
      ahead += int64_t(ROWS) * CHUNK * chunks * int(sizeof(typename Kind::Weight));
    } else {
      tile<Kind, ROWS, NUM, false>(panel, x, strip_floats, chunks, first, totals, ahead);
    }
  }
}

// by_token[t] = the sums of LANES rows of W with the strip's row t.
inline void turn_sums(const float* totals, Vec* by_token) {
  Vec sums[FOURS];
  for (int i = 0; i < FOURS; i++, totals += 4 * LANES) {
    Vec in[4];
    for (int j = 0; j < 4; j++) in[j] = load(totals + j * LANES);
    sums[i] = sum_fours(in);
  }
  turn_fours(sums, by_token);
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
  const int64_t num_strips = strips.count(), part_floats = num_strips * LANES * LANES;
  float* totals = room.of(2 * part_floats);
  for (int n = n_begin; n < n_end; n += LANES) {
    int rows = std::min(LANES, n_end - n);
    for (int part = 0; part < parts; part++) {
      const Weight* w = weight + (int64_t(part) * op.n + n) * op.k;
      for (int at = 0; at < op.k; at += columns) {
        int count = std::min(columns, op.k - at), chunks = (count + CHUNK - 1) / CHUNK;
        panel.fill(w + at, op.k, rows, count);
        // As much of the next LANES rows as this panel is, in the order in which they lie.
        const char* ahead = reinterpret_cast<const char*>(w + int64_t(LANES) * (op.k + at));
        for (int64_t i = 0; i < num_strips; i += MOST_STRIPS)
          tiles<Kind, MOST_STRIPS>(int(std::min<int64_t>(MOST_STRIPS, num_strips - i)), panel.values,
                                   strips.values + i * strips.size() + at / Kind::COLUMNS * FOURS,
                                   strips.size(), chunks, at == 0,
                                   totals + part * part_floats + i * LANES * LANES, i == 0, ahead);
      }
    }
    for (int64_t i = 0; i < num_strips; i++) {
      Vec sums[FOURS], ups[FOURS];
      turn_sums(totals + i * LANES * LANES, sums);
      if (parts == 2) turn_sums(totals + part_floats + i * LANES * LANES, ups);
      for (int64_t t = i * FOURS; t < std::min(strips.rows, (i + 1) * FOURS); t++)
        finish_row(op, activation, out, strips.t + t, n, rows, sums[t % FOURS],
                   parts == 2 ? ups[t % FOURS] : zero());
    }
  }
}

template <class Kind>
inline void times_block(Pool& pool, const Linear& op, int activation, const bf16* x,
                        const Strips& strips, const Output& out) {
  constexpr int FILLED = 128;  // columns of a piece of work
  int parts = (op.k + FILLED - 1) / FILLED;
  int padded = (op.k + CHUNK - 1) / CHUNK * CHUNK;
  auto fill = [&](int number) {
    int begin = number % parts * FILLED;
    fill_strip<Kind>(strips, number / parts, x, op.k, begin, std::min(padded, begin + FILLED));
  };
  pool.each(int(strips.count()) * parts, fill);
  int64_t row_bytes = int64_t(op.k) * int64_t(sizeof(typename Kind::Weight));
  int rows = int(std::max<int64_t>(PIECE_BYTES / 4 / row_bytes, 1) + LANES - 1) / LANES * LANES;
  auto piece = [&](int number) {
    int begin = number * rows, end = std::min(op.n, begin + rows);
    if (strips.few()) {
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
  int64_t block = std::min(std::clamp<int64_t>(fitting, 2 * LANES, MOST_ROWS), num_rows);
  float* values = room.of((block + FOURS) * places);
  for (int64_t t = 0; t < num_rows; t += block)
    times_block<Kind>(pool, op, activation, x, {t, std::min(block, num_rows - t), places, values}, out);
}

}  // namespace polyhost
