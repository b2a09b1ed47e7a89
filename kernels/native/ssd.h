// State space models, token by token, in the state where it lies: kernels/ssd.py.
//
// Mamba-2: a piece of work is one head [p, n] of one row. Mamba-1: some channels [n] of one row. A
// token's B and C are widened once; then the state is read and written once, four of its rows at a
// time, and each row is summed along n.

#pragma once

#include <cmath>
#include <type_traits>

#include "pool.h"
#include "states.h"

namespace polyhost {

struct Ssd {
  const void *x, *b, *c;   // [T, heads, dim], [T, groups, size] twice; tokens a stride apart
  const float *dt, *a, *d;  // [T, heads]; [heads], or [heads, size] (`selective`); [heads] or null
  void* out;               // [T, heads, dim]
  int64_t x_stride, b_stride, c_stride;
  int32_t heads, groups, dim, size;
  int32_t selective, wide;  // `selective`: Mamba-1, dim 1; `wide`: all but dt, a, d is float32
};

constexpr int SCAN_CHANNELS = 64;  // of one piece of work

template <class T>
inline void widen_row(const T* x, float* y, int n) {
  int i = 0;
  for (; i + LANES <= n; i += LANES) store(y + i, load_wide(x + i));
  for (; i < n; i++) y[i] = wide(x[i]);
}

// One token's B and C of a group, float32.
struct SsdToken {
  alignas(64) float b[MAX_STATE_DIM], c[MAX_STATE_DIM];
};

template <class T>
inline void read_token(const Ssd& op, int64_t t, int head, SsdToken* token) {
  int64_t group = head / (op.heads / op.groups);
  widen_row((const T*)op.b + t * op.b_stride + group * op.size, token->b, op.size);
  widen_row((const T*)op.c + t * op.c_stride + group * op.size, token->c, op.size);
}

template <class T>
inline void prefetch_token(const Ssd& op, int64_t t, int head, int count) {
  int64_t group = head / (op.heads / op.groups), at = t * op.heads + head;
  prefetch_row((const T*)op.b + t * op.b_stride + group * op.size, op.size);
  prefetch_row((const T*)op.c + t * op.c_stride + group * op.size, op.size);
  prefetch_row((const T*)op.x + t * op.x_stride + int64_t(head) * op.dim, count * op.dim);
  prefetch_row((const T*)op.out + at * op.dim, count * op.dim);
  prefetch_row(op.dt + at, count);
}

// P rows of n: to = decay from + x b; out: their sums with c.
template <int P>
inline void ssd_rows(const float* from, float* to, float decay, const float* x,
                     const SsdToken& token, int n, float* out) {
  Vec by = fill(decay), total[P];
  for (int p = 0; p < P; p++) total[p] = zero();
  int i = 0;
  for (; i + LANES <= n; i += LANES) {
    Vec b = load(token.b + i), c = load(token.c + i);
    for (int p = 0; p < P; p++) {
      Vec value = fma(fill(x[p]), b, mul(by, load(from + p * n + i)));
      store(to + p * n + i, value);
      total[p] = fma(value, c, total[p]);
    }
  }
  for (int p = 0; p < P; p++) {
    out[p] = sum(total[p]);
    for (int j = i; j < n; j++) {
      float value = fma(x[p], token.b[j], decay * from[p * n + j]);
      to[p * n + j] = value;
      out[p] = fma(value, token.c[j], out[p]);
    }
  }
}

// The same where each place has a decay of its own: e^(a dt).
inline float scan_row(const float* from, float* to, const float* a, float dt, float x,
                      const SsdToken& token, int n) {
  Vec step = fill(dt), in = fill(x), total = zero();
  int i = 0;
  for (; i + LANES <= n; i += LANES) {
    Vec decay = exponential(mul(load(a + i), step));
    Vec value = fma(in, load(token.b + i), mul(decay, load(from + i)));
    store(to + i, value);
    total = fma(value, load(token.c + i), total);
  }
  float y = sum(total);
  for (; i < n; i++) {
    to[i] = fma(x, token.b[i], std::exp(a[i] * dt) * from[i]);
    y = fma(to[i], token.c[i], y);
  }
  return y;
}

template <class T>
void ssd_head(const Ssd& op, const States& states, int row, int head) {
  int64_t size = int64_t(op.dim) * op.size;
  Part<float> part = part_of<float>(states, row, head, 1, op.heads, size);
  SsdToken token;
  const float* from = part.from;
  for (int64_t t = part.begin; t < part.end; t++, from = part.to) {
    if (t + AHEAD < part.end) prefetch_token<T>(op, t + AHEAD, head, 1);
    read_token<T>(op, t, head, &token);
    float dt = op.dt[t * op.heads + head], decay = std::exp(dt * op.a[head]);
    const T* x = (const T*)op.x + t * op.x_stride + int64_t(head) * op.dim;
    T* out = (T*)op.out + (t * op.heads + head) * op.dim;
    int p = 0;
    auto rows = [&](auto count) {
      constexpr int P = decltype(count)::value;
      float in[P], y[P];
      for (int j = 0; j < P; j++) in[j] = dt * wide(x[p + j]);
      int64_t at = int64_t(p) * op.size;
      ssd_rows<P>(from + at, part.to + at, decay, in, token, op.size, y);
      for (int j = 0; j < P; j++)
        store_from(out + p + j, op.d ? fma(op.d[head], wide(x[p + j]), y[j]) : y[j]);
      p += P;
    };
    while (p + 4 <= op.dim) rows(std::integral_constant<int, 4>());
    while (p < op.dim) rows(std::integral_constant<int, 1>());
  }
}

template <class T>
void scan_block(const Ssd& op, const States& states, int row, int first, int count) {
  Part<float> part = part_of<float>(states, row, first, count, op.heads, op.size);
  SsdToken token;
  const float* from = part.from;
  for (int64_t t = part.begin; t < part.end; t++, from = part.to) {
    if (t + AHEAD < part.end) prefetch_token<T>(op, t + AHEAD, first, count);
    read_token<T>(op, t, 0, &token);
    const T* x = (const T*)op.x + t * op.x_stride + first;
    const float* dt = op.dt + t * op.heads + first;
    T* out = (T*)op.out + t * op.heads + first;
    for (int i = 0; i < count; i++) {
      float value = wide(x[i]);
      int64_t at = int64_t(i) * op.size;
      float y = scan_row(from + at, part.to + at, op.a + (first + i) * int64_t(op.size), dt[i],
                         dt[i] * value, token, op.size);
      store_from(out + i, op.d ? fma(op.d[first + i], value, y) : y);
    }
  }
}

template <class T>
void ssd_of(Pool& pool, const Ssd& op, const States& states) {
  Blocks blocks(states, op.heads, op.selective ? SCAN_CHANNELS : 1);
  int of_row = blocks.in_piece() * states.num_pieces;
  auto piece = [&](int number) {
    int row = number / of_row, block = number % of_row;
    if (op.selective)
      return scan_block<T>(op, states, row, blocks.first(block), blocks.count(block));
    ssd_head<T>(op, states, row, block);
  };
  pool.each_in_order(states.num_rows * of_row, piece);
}

inline void ssd(Pool& pool, const Ssd& op, const States& states) {
  if (op.wide) return ssd_of<float>(pool, op, states);
  ssd_of<bf16>(pool, op, states);
}

}  // namespace polyhost
