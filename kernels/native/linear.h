// y = x W^T + b for bfloat16 x [T, K] and W [N, K], both row after row as they lie in the arena.
//
// Nothing is packed: a row of W and a row of x are both read along K, as pairs, and LANES products
// of rows are summed at once. So weights that were swapped in a moment ago run as fast as any. One
// row of x reads W at the speed of memory; with many, W's rows stay in the first cache while the
// rows of x pass, and W is read from memory once.
//
// `gate`: W is gate's N rows and then up's; y [T, N] = act(gate) * up, never stored apart.

#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "pool.h"
#include "vec.h"

namespace polyhost {

enum Activation { NONE = 0, SILU = 1, GELU_TANH = 2, GELU = 3 };

struct Linear {
  const bf16* weight;  // [n, k], or [2 n, k] of gate and up
  const bf16* bias;    // [n] or null
  int32_t n, k;
};

inline float activate(float g, int activation) {
  switch (activation) {
    case SILU: return g / (1.0f + std::exp(-g));
    case GELU_TANH:
      return 0.5f * g * (1.0f + std::tanh(0.7978845608f * (g + 0.044715f * g * g * g)));
    case GELU: return 0.5f * g * (1.0f + std::erf(g * 0.70710678f));
    default: return g;
  }
}

inline Pairs load_tail(const bf16* p, int count) {
  bf16 padded[PAIRS] = {};
  std::memcpy(padded, p, size_t(count) * sizeof(bf16));
  return load_pairs(padded);
}

inline Pairs load_some(const bf16* p, int count) {
  return count >= PAIRS ? load_pairs(p) : load_tail(p, count);
}

// The rows of x as tiles read them. Where products of pairs are one instruction: as they lie. Elsewhere
// they are widened once for many rows of W: of every PAIRS values the lower of each pair, then the
// upper ones, zero behind the end.
struct Columns {
#ifdef __AVX512BF16__
  using Value = bf16;
  const bf16* values;
  int64_t stride;

  Columns(const bf16* x, int64_t, int k) : values(x), stride(k) {}
#else
  using Value = float;
  const float* values;
  int64_t stride;

  Columns(const bf16* x, int64_t count, int k) : stride((k + PAIRS - 1) / PAIRS * PAIRS) {
    thread_local std::vector<float> room;
    if (int64_t(room.size()) < count * stride) room.resize(size_t(count * stride));
    for (int64_t t = 0; t < count; t++)
      for (int at = 0; at < k; at += PAIRS) {
        Pairs pairs = load_some(x + t * k + at, k - at);
        store(room.data() + t * stride + at, low_of(pairs));
        store(room.data() + t * stride + at + LANES, high_of(pairs));
      }
    values = room.data();
  }
#endif
};

// acc[i * COLS + j] += the products of one register of W's row i and of x's row j.
template <int ROWS, int COLS>
inline void accumulate(const Pairs* left, const Columns::Value* x, int64_t stride, int count,
                       Vec* acc) {
#ifdef __AVX512BF16__
  for (int j = 0; j < COLS; j++) {
    Pairs right = load_some(x + j * stride, count);
    for (int i = 0; i < ROWS; i++)
      acc[i * COLS + j] = dot_pairs(acc[i * COLS + j], left[i], right);
  }
#else
  (void)count;
  Vec low[ROWS], high[ROWS];
  for (int i = 0; i < ROWS; i++) {
    low[i] = low_of(left[i]);
    high[i] = high_of(left[i]);
  }
  for (int j = 0; j < COLS; j++) {
    Vec right_low = load(x + j * stride), right_high = load(x + j * stride + LANES);
    for (int i = 0; i < ROWS; i++) {
      Vec& sum = acc[i * COLS + j];
      sum = fma(high[i], right_high, fma(low[i], right_low, sum));
    }
  }
#endif
}

// out[i * COLS + j] = W[i] . x[j] for ROWS rows of W and COLS rows of x; ROWS * COLS <= LANES.
template <int ROWS, int COLS>
inline void tile(const bf16* w, const Columns::Value* x, int64_t stride, int k, float* out) {
  Vec acc[LANES];
  for (int i = 0; i < LANES; i++) acc[i] = zero();
  Pairs left[ROWS];
  int at = 0;
  for (; at + PAIRS <= k; at += PAIRS) {
    for (int i = 0; i < ROWS; i++) left[i] = load_pairs(w + int64_t(i) * k + at);
    accumulate<ROWS, COLS>(left, x + at, stride, PAIRS, acc);
  }
  if (at < k) {
    for (int i = 0; i < ROWS; i++) left[i] = load_tail(w + int64_t(i) * k + at, k - at);
    accumulate<ROWS, COLS>(left, x + at, stride, k - at, acc);
  }
  store(out, sum_each(acc));
}

// Rows of W in a tile beside COLS rows of x: LANES products in all.
constexpr int rows_beside(int cols) { return LANES / cols; }

// sums[i * COLS + j] for i < rows (<= rows_beside(COLS)).
template <int COLS>
inline void tile_any(const bf16* w, const Columns::Value* x, int64_t stride, int k, int rows,
                     float* sums) {
  constexpr int ROWS = rows_beside(COLS);
  if (rows == ROWS) {
    tile<ROWS, COLS>(w, x, stride, k, sums);
    return;
  }
  float one[LANES];
  for (int i = 0; i < rows; i++) {
    tile<1, COLS>(w + int64_t(i) * k, x, stride, k, one);
    for (int j = 0; j < COLS; j++) sums[i * COLS + j] = one[j];
  }
}

struct Output {
  void* y;          // bf16 or float32 [T, stride]
  int64_t stride;
  bool wide;        // float32
};

inline void put(const Output& out, int64_t t, int64_t n, float value) {
  if (out.wide) {
    static_cast<float*>(out.y)[t * out.stride + n] = value;
  } else {
    static_cast<bf16*>(out.y)[t * out.stride + n] = narrow(value);
  }
}

// Rows [n, n_end) of W against COLS rows of x from its row `t` on; x's first row is `from` of y.
template <int COLS>
inline void strip(const Linear& op, int activation, const Columns& x, int64_t t, int64_t from,
                  int n, int n_end, const Output& out) {
  constexpr int ROWS = rows_beside(COLS);
  const Columns::Value* columns = x.values + t * x.stride;
  float sums[LANES], ups[LANES];
  for (int row = n; row < n_end; row += ROWS) {
    int rows = std::min(ROWS, n_end - row);
    const bf16* w = op.weight + int64_t(row) * op.k;
    tile_any<COLS>(w, columns, x.stride, op.k, rows, sums);
    if (activation != NONE) {
      tile_any<COLS>(w + int64_t(op.n) * op.k, columns, x.stride, op.k, rows, ups);
      for (int i = 0; i < rows * COLS; i++) ups[i] *= activate(sums[i], activation);
    }
    const float* values = activation == NONE ? sums : ups;
    for (int i = 0; i < rows; i++) {
      float bias = op.bias ? widen(op.bias[row + i]) : 0.0f;
      for (int j = 0; j < COLS; j++)
        put(out, from + t + j, row + i, values[i * COLS + j] + bias);
    }
  }
}

// Rows of x that are passed before the next rows of W: as much as the second cache holds well.
constexpr int64_t X_BLOCK_BYTES = 512 * 1024;
// A piece of work: enough of W to be worth taking, little enough for all to end together.
constexpr int64_t PIECE_BYTES = 96 * 1024;

inline void linear_piece(const Linear& op, int activation, const bf16* x, int64_t t_begin,
                         int64_t t_end, int n_begin, int n_end, const Output& out) {
  constexpr int WIDE = LANES == 16 ? 4 : 2;
  int64_t count = t_end - t_begin;
  Columns columns(x + t_begin * op.k, count, op.k);
  if (count == 1) {
    strip<1>(op, activation, columns, 0, t_begin, n_begin, n_end, out);
    return;
  }
  // A few rows of W stay near while all rows of x pass.
  for (int n = n_begin; n < n_end; n += rows_beside(WIDE)) {
    int end = std::min(n + rows_beside(WIDE), n_end);
    int64_t t = 0;
    for (; t + WIDE <= count; t += WIDE)
      strip<WIDE>(op, activation, columns, t, t_begin, n, end, out);
    for (; t + 2 <= count; t += 2) strip<2>(op, activation, columns, t, t_begin, n, end, out);
    if (t < count) strip<1>(op, activation, columns, t, t_begin, n, end, out);
  }
}

inline void linear(Pool& pool, const Linear& op, int activation, const bf16* x, int64_t num_rows,
                   const Output& out) {
  if (num_rows <= 0) return;
  int64_t row_bytes = int64_t(op.k) * 2;
  int64_t x_rows = std::max<int64_t>(8, X_BLOCK_BYTES / row_bytes / 8 * 8);
  int64_t x_blocks = (num_rows + x_rows - 1) / x_rows;
  int64_t rows = std::max<int64_t>(LANES, PIECE_BYTES / row_bytes / LANES * LANES);
  if (activation != NONE) rows = std::max<int64_t>(LANES, rows / 2 / LANES * LANES);
  rows = std::min<int64_t>(rows, op.n);
  int n_blocks = int((op.n + rows - 1) / rows);
  auto piece = [&](int number) {
    // All blocks of x for the same rows of W follow one another.
    int64_t block = number / x_blocks, x_block = number % x_blocks;
    int n_begin = int(block * rows), n_end = int(std::min<int64_t>(op.n, n_begin + rows));
    int64_t t_begin = x_block * x_rows, t_end = std::min(num_rows, t_begin + x_rows);
    linear_piece(op, activation, x, t_begin, t_end, n_begin, n_end, out);
  };
  pool.each(int(n_blocks * x_blocks), piece);
}

}  // namespace polyhost
