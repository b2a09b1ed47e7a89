// y = x W^T + b for bfloat16 x [T, K] and W [N, K], both row after row as they lie in the arena.
//
// Nothing is packed: a row of W and a row of x are both read along K, as pairs, and LANES products
// of rows are summed at once. So weights that were swapped in a moment ago run as fast as any. One
// row of x reads W at the speed of memory; with many, W's rows stay in the first cache while the
// rows of x pass, and W is read from memory once.
//
// W may be int8 with a scale a row, which is applied to the sums: weights are widened in registers,
// x stays what it is.
//
// With an activation W is gate's N rows and then up's; y [T, N] = act(gate) * up, never stored apart.

#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "pool.h"
#include "vec.h"

namespace polyhost {

enum Activation { NONE = 0, SILU = 1, GELU_TANH = 2, GELU = 3 };

// How a weight is stored. INT4: kernels/int4_blocks.py.
enum Format { BF16 = 0, INT8 = 1, INT4 = 2 };

struct Linear {
  const void* weight;  // [n, k], or [2 n, k] of gate and up
  const bf16* bias;    // [n] or null
  const bf16* scale;   // of int8: one a row
  int32_t n, k;
  int32_t format, reserved;
};

template <class F>
inline Vec each_lane(Vec v, F f) {
  float lanes[LANES];
  store(lanes, v);
  for (float& lane : lanes) lane = f(lane);
  return load(lanes);
}

inline Vec activate(Vec g, int activation) {
  switch (activation) {
    case SILU: return divide(g, add(fill(1.0f), exponential(sub(zero(), g))));
    case GELU_TANH:
      return each_lane(g, [](float v) {
        return 0.5f * v * (1.0f + std::tanh(0.7978845608f * (v + 0.044715f * v * v * v)));
      });
    case GELU:
      return each_lane(g, [](float v) { return 0.5f * v * (1.0f + std::erf(v * 0.70710678f)); });
    default: return g;
  }
}

// PAIRS values of x or W, widened, in the order in which both sides of a product have them.
struct Wide {
  Vec a, b;
};

// bfloat16: of every PAIRS values the lower of each pair, then the upper ones.
struct Halves {
  using Weight = bf16;
  static Wide load(const bf16* p) {
    Pairs pairs = load_pairs(p);
    return {low_of(pairs), high_of(pairs)};
  }
  static Wide load_x(const bf16* p) { return load(p); }
};

// int8: one after another.
struct Bytes {
  using Weight = int8_t;
  static Wide load(const int8_t* p) { return {load_int8(p), load_int8(p + LANES)}; }
  static Wide load_x(const bf16* p) { return {load_bf16(p), load_bf16(p + LANES)}; }
};

#ifdef __AVX512BF16__
// bfloat16 where a product of pairs is one instruction: nothing is widened.
struct Whole {
  using Weight = bf16;
};
using Brief = Whole;
#else
using Brief = Halves;
#endif

// `count` values at p, zeros behind them.
template <class T>
struct Padded {
  T values[PAIRS] = {};
  Padded(const T* p, int count) { std::memcpy(values, p, size_t(count) * sizeof(T)); }
};

// The rows of x as tiles read them: widened once for many rows of W, zero behind the end.
template <class Kind>
struct Columns {
  using Value = float;
  const float* values;
  int64_t stride;

  Columns(const bf16* x, int64_t count, int k) : stride((k + PAIRS - 1) / PAIRS * PAIRS) {
    thread_local std::vector<float> room;
    if (int64_t(room.size()) < count * stride) room.resize(size_t(count * stride));
    for (int64_t t = 0; t < count; t++)
      for (int at = 0; at < k; at += PAIRS) {
        const bf16* p = x + t * k + at;
        Wide wide = at + PAIRS <= k ? Kind::load_x(p) : Kind::load_x(Padded<bf16>(p, k - at).values);
        store(room.data() + t * stride + at, wide.a);
        store(room.data() + t * stride + at + LANES, wide.b);
      }
    values = room.data();
  }
};

// sums[j * ROWS + i] += the products of PAIRS values of W's row i and of x's row j; `w`: where they
// begin in W's first row, `count` how many there are.
template <class Kind, int ROWS, int COLS>
struct Accumulate {
  static void run(const typename Kind::Weight* w, int k, const float* x, int64_t stride, int count,
                  Vec* sums) {
    Wide left[ROWS];
    for (int i = 0; i < ROWS; i++) {
      const typename Kind::Weight* p = w + int64_t(i) * k;
      left[i] = count == PAIRS
                    ? Kind::load(p)
                    : Kind::load(Padded<typename Kind::Weight>(p, count).values);
    }
    for (int j = 0; j < COLS; j++) {
      Vec a = load(x + j * stride), b = load(x + j * stride + LANES);
      for (int i = 0; i < ROWS; i++) {
        Vec& sum = sums[j * ROWS + i];
        sum = fma(left[i].b, b, fma(left[i].a, a, sum));
      }
    }
  }
};

#ifdef __AVX512BF16__
template <>
struct Columns<Whole> {
  using Value = bf16;
  const bf16* values;
  int64_t stride;

  Columns(const bf16* x, int64_t, int k) : values(x), stride(k) {}
};

template <int ROWS, int COLS>
struct Accumulate<Whole, ROWS, COLS> {
  static void run(const bf16* w, int k, const bf16* x, int64_t stride, int count, Vec* sums) {
    Pairs left[ROWS];
    for (int i = 0; i < ROWS; i++) left[i] = pairs_at(w + int64_t(i) * k, count);
    for (int j = 0; j < COLS; j++) {
      Pairs right = pairs_at(x + j * stride, count);
      for (int i = 0; i < ROWS; i++)
        sums[j * ROWS + i] = dot_pairs(sums[j * ROWS + i], left[i], right);
    }
  }

  static Pairs pairs_at(const bf16* p, int count) {
    return count == PAIRS ? load_pairs(p) : load_pairs(Padded<bf16>(p, count).values);
  }
};
#endif

// out[j * ROWS + i] = W[i] . x[j] for ROWS rows of W and COLS rows of x; ROWS * COLS <= LANES.
template <class Kind, int ROWS, int COLS>
inline void tile(const typename Kind::Weight* w, const typename Columns<Kind>::Value* x,
                 int64_t stride, int k, float* out) {
  Vec sums[LANES];
  for (int i = 0; i < LANES; i++) sums[i] = zero();
  int at = 0;
  for (; at + PAIRS <= k; at += PAIRS)
    Accumulate<Kind, ROWS, COLS>::run(w + at, k, x + at, stride, PAIRS, sums);
  if (at < k) Accumulate<Kind, ROWS, COLS>::run(w + at, k, x + at, stride, k - at, sums);
  store(out, sum_each(sums));
}

// Rows of W in a tile beside COLS rows of x: LANES products in all.
constexpr int rows_beside(int cols) { return LANES / cols; }

// sums[j * ROWS + i] for i < rows (<= ROWS = rows_beside(COLS)); the others are zero.
template <class Kind, int COLS>
inline void tile_any(const typename Kind::Weight* w, const typename Columns<Kind>::Value* x,
                     int64_t stride, int k, int rows, float* sums) {
  constexpr int ROWS = rows_beside(COLS);
  if (rows == ROWS) {
    tile<Kind, ROWS, COLS>(w, x, stride, k, sums);
    return;
  }
  store(sums, zero());
  float one[LANES];
  for (int i = 0; i < rows; i++) {
    tile<Kind, 1, COLS>(w + int64_t(i) * k, x, stride, k, one);
    for (int j = 0; j < COLS; j++) sums[j * ROWS + i] = one[j];
  }
}

struct Output {
  void* y;          // bf16 or float32 [T, stride]
  int64_t stride;
  bool wide;        // float32
};

// A value a row of W, from `row` on, as tiles have their sums: once for each of COLS columns.
template <int COLS>
inline Vec of_rows(const bf16* values, int row, int rows, float other) {
  constexpr int ROWS = rows_beside(COLS);
  float lanes[LANES];
  for (int i = 0; i < ROWS; i++) lanes[i] = i < rows ? widen(values[row + i]) : other;
  for (int j = 1; j < COLS; j++) std::memcpy(lanes + j * ROWS, lanes, ROWS * sizeof(float));
  return load(lanes);
}

// y[t + j][row + i] = values[j * ROWS + i].
template <int COLS>
inline void put(const Output& out, int64_t t, int row, int rows, Vec values) {
  constexpr int ROWS = rows_beside(COLS);
  if (out.wide) {
    float lanes[LANES];
    store(lanes, values);
    for (int j = 0; j < COLS; j++)
      std::memcpy(static_cast<float*>(out.y) + (t + j) * out.stride + row, lanes + j * ROWS,
                  size_t(rows) * sizeof(float));
  } else {
    bf16 lanes[LANES];
    store_bf16(lanes, values);
    for (int j = 0; j < COLS; j++)
      std::memcpy(static_cast<bf16*>(out.y) + (t + j) * out.stride + row, lanes + j * ROWS,
                  size_t(rows) * sizeof(bf16));
  }
}

// Rows [n, n_end) of W against COLS rows of x from its row `t` on; x's first row is `from` of y.
template <class Kind, int COLS>
inline void strip(const Linear& op, int activation, const Columns<Kind>& x, int64_t t,
                  int64_t from, int n, int n_end, const Output& out) {
  constexpr int ROWS = rows_beside(COLS);
  const auto* columns = x.values + t * x.stride;
  const auto* weight = static_cast<const typename Kind::Weight*>(op.weight);
  float sums[LANES];
  for (int row = n; row < n_end; row += ROWS) {
    int rows = std::min(ROWS, n_end - row);
    const auto* w = weight + int64_t(row) * op.k;
    tile_any<Kind, COLS>(w, columns, x.stride, op.k, rows, sums);
    Vec values = load(sums);
    if (op.scale) values = mul(values, of_rows<COLS>(op.scale, row, rows, 1.0f));
    if (activation != NONE) {
      tile_any<Kind, COLS>(w + int64_t(op.n) * op.k, columns, x.stride, op.k, rows, sums);
      Vec ups = load(sums);
      if (op.scale) ups = mul(ups, of_rows<COLS>(op.scale, op.n + row, rows, 1.0f));
      values = mul(activate(values, activation), ups);
    }
    if (op.bias) values = add(values, of_rows<COLS>(op.bias, row, rows, 0.0f));
    put<COLS>(out, from + t, row, rows, values);
  }
}

// Rows of x that are passed before the next rows of W: as much as the second cache holds well.
constexpr int64_t X_BLOCK_BYTES = 512 * 1024;
// A piece of work: enough of W to be worth taking, little enough for all to end together.
constexpr int64_t PIECE_BYTES = 96 * 1024;

template <class Kind>
inline void linear_piece(const Linear& op, int activation, const bf16* x, int64_t t_begin,
                         int64_t t_end, int n_begin, int n_end, const Output& out) {
  constexpr int WIDE = LANES == 16 ? 4 : 2;
  int64_t count = t_end - t_begin;
  Columns<Kind> columns(x + t_begin * op.k, count, op.k);
  if (count == 1) {
    strip<Kind, 1>(op, activation, columns, 0, t_begin, n_begin, n_end, out);
    return;
  }
  // A few rows of W stay near while all rows of x pass.
  for (int n = n_begin; n < n_end; n += rows_beside(WIDE)) {
    int end = std::min(n + rows_beside(WIDE), n_end);
    int64_t t = 0;
    for (; t + WIDE <= count; t += WIDE)
      strip<Kind, WIDE>(op, activation, columns, t, t_begin, n, end, out);
    for (; t + 2 <= count; t += 2) strip<Kind, 2>(op, activation, columns, t, t_begin, n, end, out);
    if (t < count) strip<Kind, 1>(op, activation, columns, t, t_begin, n, end, out);
  }
}

// With x as it is. Not for INT4.
inline void float_linear(Pool& pool, const Linear& op, int activation, const bf16* x,
                         int64_t num_rows, const Output& out) {
  if (num_rows <= 0) return;
  int64_t row_bytes = int64_t(op.k) * (op.scale ? 1 : 2);
  int64_t x_rows = std::max<int64_t>(8, X_BLOCK_BYTES / (int64_t(op.k) * 2) / 8 * 8);
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
    if (op.scale) {
      linear_piece<Bytes>(op, activation, x, t_begin, t_end, n_begin, n_end, out);
    } else {
      linear_piece<Brief>(op, activation, x, t_begin, t_end, n_begin, n_end, out);
    }
  };
  pool.each(int(n_blocks * x_blocks), piece);
}

}  // namespace polyhost
