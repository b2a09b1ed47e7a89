// Depthwise causal convolutions of a few taps: kernels/short_conv.py.
//
// A piece of work is a few channels of all rows, so weights are turned once; lanes are channels, and
// the last K inputs of each are in the first cache while a row's tokens go by.

#pragma once

#include "pool.h"
#include "states.h"

namespace polyhost {

struct ShortConv {
  const void *x, *weight, *bias;  // [T, channels], rows a stride apart; [channels, taps]; or null
  void* out;                      // [T, channels]
  int64_t x_stride;
  int32_t channels, taps;
  int32_t silu, wide;  // `wide`: all is float32, the state too; else bfloat16
};

constexpr int CONV_CHANNELS = 128;  // of one piece of work
constexpr int MAX_TAPS = 8;

// The first `count` lanes; the others are zero.
template <class T>
inline Vec load_some(const T* p, int count) {
  if (count == LANES) return load_wide(p);
  float values[LANES] = {};
  for (int i = 0; i < count; i++) values[i] = wide(p[i]);
  return load(values);
}

template <class T>
inline void store_some(T* p, Vec v, int count) {
  if (count == LANES) return store_from(p, v);
  float values[LANES];
  store(values, v);
  for (int i = 0; i < count; i++) store_from(p + i, values[i]);
}

// Lane i of tap j is p[i * K + j].
template <class T, int K>
inline void load_taps(const T* p, int count, Vec* taps) {
  if (K == 4 && count == LANES) {
    Vec fours[4];
    for (int j = 0; j < 4; j++) fours[j] = load_wide(p + j * LANES);
    return fours_apart(fours, taps);
  }
  float values[K][LANES] = {};
  for (int i = 0; i < count; i++)
    for (int j = 0; j < K; j++) values[j][i] = wide(p[i * K + j]);
  for (int j = 0; j < K; j++) taps[j] = load(values[j]);
}

template <class T, int K>
inline void store_taps(T* p, int count, const Vec* taps) {
  if (K == 4 && count == LANES) {
    Vec fours[4];
    fours_together(taps, fours);
    for (int j = 0; j < 4; j++) store_exact(p + j * LANES, fours[j]);
    return;
  }
  float values[K][LANES];
  for (int j = 0; j < K; j++) store(values[j], taps[j]);
  for (int i = 0; i < count; i++)
    for (int j = 0; j < K; j++) store_from(p + i * K + j, values[j][i]);
}

// One token of LANES channels (`count` of them): the last K inputs move on.
template <class T, int K>
inline Vec conv_token(const T* x, int count, const Vec* weight, Vec bias, Vec* last) {
  for (int j = 0; j + 1 < K; j++) last[j] = last[j + 1];
  last[K - 1] = load_some(x, count);
  Vec y = bias;
  for (int j = 0; j < K; j++) y = fma(weight[j], last[j], y);
  return y;
}

template <class T, int K>
void conv_block(const ShortConv& op, const States& states, int first, int count) {
  Vec weight[CONV_CHANNELS / LANES][K], last[CONV_CHANNELS / LANES][K];
  Vec bias[CONV_CHANNELS / LANES];
  auto each_group = [&](auto f) {
    for (int i = 0; i < count; i += LANES) f(i / LANES, i, std::min(LANES, count - i));
  };
  each_group([&](int group, int i, int lanes) {
    load_taps<T, K>((const T*)op.weight + int64_t(first + i) * K, lanes, weight[group]);
    bias[group] = op.bias ? load_some((const T*)op.bias + first + i, lanes) : zero();
  });
  for (int row = 0; row < states.num_rows; row++) {
    if (row + 1 < states.num_rows) prefetch_part<T>(states, row + 1, first, count, op.channels, K);
    Part<T> part = part_of<T>(states, row, first, count, op.channels, K);
    if (part.begin == part.end) continue;
    each_group([&](int group, int i, int lanes) {
      load_taps<T, K>(part.from + i * K, lanes, last[group]);
    });
    for (int64_t t = part.begin; t < part.end; t++) {
      const T* x = (const T*)op.x + t * op.x_stride + first;
      T* out = (T*)op.out + t * op.channels + first;
      if (t + AHEAD < part.end) {
        prefetch_row(x + AHEAD * op.x_stride, count);
        prefetch_row(out + AHEAD * int64_t(op.channels), count);
      }
      each_group([&](int group, int i, int lanes) {
        Vec y = conv_token<T, K>(x + i, lanes, weight[group], bias[group], last[group]);
        if (op.silu) y = divide(y, add(fill(1.0f), exponential(sub(zero(), y))));
        store_some(out + i, y, lanes);
      });
    }
    each_group([&](int group, int i, int lanes) {
      store_taps<T, K>(part.to + i * K, lanes, last[group]);
    });
  }
}

template <class T>
using ConvBlock = void (*)(const ShortConv&, const States&, int, int);

template <class T>
void short_conv_of(Pool& pool, const ShortConv& op, const States& states) {
  static constexpr ConvBlock<T> by_taps[MAX_TAPS - 1] = {
      conv_block<T, 2>, conv_block<T, 3>, conv_block<T, 4>, conv_block<T, 5>,
      conv_block<T, 6>, conv_block<T, 7>, conv_block<T, 8>,
  };
  Blocks blocks(states, op.channels, CONV_CHANNELS);
  auto piece = [&](int block) {
    by_taps[op.taps - 2](op, states, blocks.first(block), blocks.count(block));
  };
  pool.each_in_order(blocks.in_piece() * states.num_pieces, piece);
}

inline void short_conv(Pool& pool, const ShortConv& op, const States& states) {
  if (op.wide) return short_conv_of<float>(pool, op, states);
  short_conv_of<bf16>(pool, op, states);
}

}  // namespace polyhost
