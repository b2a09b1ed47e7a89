// y = x W^T + b for x [T, K] in bfloat16 and W [N, K]: what all ways of multiplying share.
//
// W lies row after row as it does in the arena (INT4: in blocks). Nothing is packed when a model is
// loaded, so weights that were swapped in a moment ago run as fast as any.
//
// With an activation W is gate's N rows and then up's; y [T, N] = act(gate) * up, never stored apart.

#pragma once

#include <cmath>
#include <cstring>
#include <memory>
#include <new>

#include "vec.h"

namespace polyhost {

enum Activation { NONE = 0, SILU = 1, GELU_TANH = 2, GELU = 3 };

// How a weight is stored. From INT4 on: in blocks of kernels/int4_blocks.py, with codes that are their
// bytes; the same with zeros; with a table of bytes up to 32; with two scales a group, too; with a
// table of bytes up to 128.
enum Format { BF16 = 0, INT8 = 1, INT4 = 2, INT4_ZEROS = 3, INT4_TABLE = 4, INT4_HALVES = 5,
              INT4_WIDE = 6 };

struct Linear {
  const void* weight;  // [n, k], or [2 n, k] of gate and up
  const bf16* bias;    // [n] or null
  const bf16* scale;   // of int8: one a row, of which the sums are multiples
  const uint8_t* table;  // of INT4_TABLE and later: the byte of each of the sixteen codes
  int32_t n, k;
  int32_t format;
  int32_t surplus;     // of int4: what bytes have too much
};

struct Output {
  void* y;  // bf16 or float32 [T, stride]
  int64_t stride;
  bool wide;  // float32
};

// Rows of W that are worth taking as one piece of work, in bytes: little enough for all threads to
// end together.
constexpr int64_t PIECE_BYTES = 96 * 1024;

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

// `count` values at p, zeros behind them.
template <class T, int SIZE>
struct Padded {
  T values[SIZE] = {};
  Padded(const T* p, int count) { std::memcpy(values, p, size_t(count) * sizeof(T)); }
};

// Room that keeps its largest size; lines of the cache begin where it does.
template <class T>
class Room {
 public:
  T* of(int64_t count) {
    if (count > size_) {
      values_.reset(static_cast<T*>(::operator new(size_t(count) * sizeof(T), LINE)));
      size_ = count;
    }
    return values_.get();
  }

 private:
  static constexpr std::align_val_t LINE{64};
  struct Free {
    void operator()(T* values) const { ::operator delete(values, LINE); }
  };
  std::unique_ptr<T, Free> values_;
  int64_t size_ = 0;
};

// bias or scale of rows [row, row + rows) of W as a register.
inline Vec row_values(const bf16* values, int row, int rows) {
  return load_bf16(Padded<bf16, LANES>(values + row, rows).values);
}

inline void put_lanes(const Output& out, int64_t t, int row, int rows, Vec values) {
  if (out.wide) {
    float* y = static_cast<float*>(out.y) + t * out.stride + row;
    float lanes[LANES];
    if (rows == LANES) return store(y, values);
    store(lanes, values);
    std::memcpy(y, lanes, size_t(rows) * sizeof(float));
  } else {
    bf16* y = static_cast<bf16*>(out.y) + t * out.stride + row;
    bf16 lanes[LANES];
    if (rows == LANES) return store_bf16(y, values);
    store_bf16(lanes, values);
    std::memcpy(y, lanes, size_t(rows) * sizeof(bf16));
  }
}

// y[t][row ...] of W's sums with x's row t: scaled, gated, with their bias. `ups`: the sums of up's
// rows, where there is an activation.
inline void finish_row(const Linear& op, int activation, const Output& out, int64_t t, int row,
                       int rows, Vec sums, Vec ups) {
  if (op.scale) sums = mul(sums, row_values(op.scale, row, rows));
  if (activation != NONE) {
    if (op.scale) ups = mul(ups, row_values(op.scale, op.n + row, rows));
    sums = mul(activate(sums, activation), ups);
  }
  if (op.bias) sums = add(sums, row_values(op.bias, row, rows));
  put_lanes(out, t, row, rows, sums);
}

}  // namespace polyhost
