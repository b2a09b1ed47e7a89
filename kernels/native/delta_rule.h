// The gated delta rule, token by token, in the state where it lies: kernels/delta_rule.py.
//
// A piece of work is one head of one row. Each token needs two passes over the head's state [k, v]:
// what its key recalls, then the correction and the result. A row of one token takes all columns
// together, so that memory is read in order; the second pass goes backwards and finds the end still
// in the cache. A chunk copies 4 registers of columns at a time (32 KiB of state, side by side, so
// that the first cache has room for them) and takes them through all its tokens. A column's sums
// have one order in both.

#pragma once

#include <cmath>

#include "pool.h"
#include "states.h"

namespace polyhost {

struct DeltaRule {
  const void *q, *k, *v;  // [T, k_heads, k_dim] twice, [T, v_heads, v_dim]; tokens a stride apart
  const float *g, *beta;  // [T, v_heads], or g [T, v_heads, k_dim] (`per_channel`); [T, v_heads]
  void* out;              // [T, v_heads, v_dim]
  int64_t q_stride, k_stride, v_stride;
  int32_t k_heads, v_heads, k_dim, v_dim;
  int32_t per_channel, wide;  // `wide`: q, k, v and out are float32, else bfloat16
};

// One token as a head sees it, float32: normalized query and key, and the factors of the state.
struct DeltaToken {
  alignas(64) float q[MAX_STATE_DIM], k[MAX_STATE_DIM], decay[MAX_STATE_DIM];
  alignas(64) float recall[MAX_STATE_DIM];  // the key times the decay
  alignas(64) float v[MAX_STATE_DIM], out[MAX_STATE_DIM];
  float beta;
};

// y = x / sqrt(|x|^2 + eps) * scale.
template <class T>
inline void unit_length(const T* x, float* y, int n, float scale) {
  Vec total = zero();
  int i = 0;
  for (; i + LANES <= n; i += LANES) {
    Vec v = load_wide(x + i);
    store(y + i, v);
    total = fma(v, v, total);
  }
  float square = sum(total);
  for (; i < n; i++) {
    y[i] = wide(x[i]);
    square = fma(y[i], y[i], square);
  }
  float by = scale / std::sqrt(square + 1e-6f);
  for (i = 0; i + LANES <= n; i += LANES) store(y + i, mul(load(y + i), fill(by)));
  for (; i < n; i++) y[i] *= by;
}

template <class T>
inline void read_token(const DeltaRule& op, int64_t t, int head, DeltaToken* token) {
  int k_dim = op.k_dim, v_dim = op.v_dim, k_head = head / (op.v_heads / op.k_heads);
  unit_length((const T*)op.q + t * op.q_stride + int64_t(k_head) * k_dim, token->q, k_dim,
              1.0f / std::sqrt(float(k_dim)));
  unit_length((const T*)op.k + t * op.k_stride + int64_t(k_head) * k_dim, token->k, k_dim, 1.0f);
  int64_t at = t * op.v_heads + head;
  const float* g = op.per_channel ? op.g + at * k_dim : op.g + at;
  int i = 0;
  if (op.per_channel) {
    for (; i + LANES <= k_dim; i += LANES) store(token->decay + i, exponential(load(g + i)));
    for (; i < k_dim; i++) token->decay[i] = std::exp(g[i]);
  } else {
    float decay = std::exp(*g);
    for (; i < k_dim; i++) token->decay[i] = decay;
  }
  for (i = 0; i < k_dim; i++) token->recall[i] = token->k[i] * token->decay[i];
  const T* v = (const T*)op.v + t * op.v_stride + int64_t(head) * v_dim;
  for (i = 0; i + LANES <= v_dim; i += LANES) store(token->v + i, load_wide(v + i));
  for (; i < v_dim; i++) token->v[i] = wide(v[i]);
  token->beta = op.beta[at];
}

template <class T>
inline void prefetch_token(const DeltaRule& op, int64_t t, int head) {
  int64_t k_head = head / (op.v_heads / op.k_heads), at = t * op.v_heads + head;
  prefetch_row((const T*)op.q + t * op.q_stride + k_head * op.k_dim, op.k_dim);
  prefetch_row((const T*)op.k + t * op.k_stride + k_head * op.k_dim, op.k_dim);
  prefetch_row((const T*)op.v + t * op.v_stride + int64_t(head) * op.v_dim, op.v_dim);
  prefetch_row((const T*)op.out + at * op.v_dim, op.v_dim);
  prefetch_row(op.g + at * (op.per_channel ? op.k_dim : 1), op.per_channel ? op.k_dim : 1);
  prefetch_row(op.beta + at, 1);
}

// N registers of columns through one token; `from` and `to`: the first row's, the others a stride on.
template <class V, int N>
inline void delta_columns(const DeltaRule& op, const float* from, float* to, int64_t stride,
                          DeltaToken* token, int column) {
  constexpr int WIDTH = sizeof(V) / sizeof(float);
  // Even rows and odd ones: a sum alone would wait for each of its products.
  V sums[N], odd[N], delta[N];
  for (int n = 0; n < N; n++) sums[n] = odd[n] = fill_as<V>(0.0f);
  int i = 0;
  const float* s = from;
  for (; i + 1 < op.k_dim; i += 2, s += 2 * stride) {
    V first = fill_as<V>(token->recall[i]), second = fill_as<V>(token->recall[i + 1]);
    for (int n = 0; n < N; n++) {
      sums[n] = fma(first, load_as<V>(s + n * WIDTH), sums[n]);
      odd[n] = fma(second, load_as<V>(s + stride + n * WIDTH), odd[n]);
    }
  }
  for (; i < op.k_dim; i++, s += stride)
    for (int n = 0; n < N; n++)
      sums[n] = fma(fill_as<V>(token->recall[i]), load_as<V>(s + n * WIDTH), sums[n]);
  V beta = fill_as<V>(token->beta);
  for (int n = 0; n < N; n++) {
    V recalled = add(sums[n], odd[n]);
    delta[n] = mul(sub(load_as<V>(token->v + column + n * WIDTH), recalled), beta);
    sums[n] = fill_as<V>(0.0f);
  }
  s = from + (op.k_dim - 1) * stride;
  float* d = to + (op.k_dim - 1) * stride;
  for (i = op.k_dim - 1; i >= 0; i--, s -= stride, d -= stride) {
    V q = fill_as<V>(token->q[i]), k = fill_as<V>(token->k[i]);
    V decay = fill_as<V>(token->decay[i]);
    for (int n = 0; n < N; n++) {
      V value = fma(k, delta[n], mul(decay, load_as<V>(s + n * WIDTH)));
      store(d + n * WIDTH, value);
      sums[n] = fma(q, value, sums[n]);
    }
  }
  for (int n = 0; n < N; n++) store(token->out + column + n * WIDTH, sums[n]);
}

inline void copy_strip(const float* from, int64_t from_stride, float* to, int64_t to_stride,
                       int rows, int count) {
  for (int i = 0; i < rows; i++, from += from_stride, to += to_stride)
    std::memcpy(to, from, size_t(count) * sizeof(float));
}

// The same through all tokens of the row, from `column` on as long as N registers are filled.
template <class T, class V, int N>
inline void delta_strip(const DeltaRule& op, const Part<float>& part, int head, DeltaToken* token,
                        int* column) {
  constexpr int WIDTH = sizeof(V) / sizeof(float), COUNT = N * WIDTH;
  alignas(64) static thread_local float strip[MAX_STATE_DIM * COUNT];
  bool many = part.end - part.begin > 1;
  for (; *column + COUNT <= op.v_dim; *column += COUNT) {
    const float* from = part.from + *column;
    float* to = part.to + *column;
    int64_t stride = op.v_dim;
    if (many) {
      copy_strip(from, stride, strip, COUNT, op.k_dim, COUNT);
      from = to = strip;
      stride = COUNT;
    }
    for (int64_t t = part.begin; t < part.end; t++) {
      if (t + AHEAD < part.end) prefetch_token<T>(op, t + AHEAD, head);
      read_token<T>(op, t, head, token);
      delta_columns<V, N>(op, from, to, stride, token, *column);
      T* out = (T*)op.out + (t * op.v_heads + head) * op.v_dim + *column;
      for (int i = 0; i < COUNT; i += WIDTH)
        store_from(out + i, load_as<V>(token->out + *column + i));
    }
    if (many) copy_strip(strip, stride, part.to + *column, op.v_dim, op.k_dim, COUNT);
  }
}

template <class T>
void delta_head(const DeltaRule& op, const States& states, int row, int head) {
  Part<float> part =
      part_of<float>(states, row, head, 1, op.v_heads, int64_t(op.k_dim) * op.v_dim);
  if (part.begin == part.end) return;
  DeltaToken token;
  int column = 0;
  if (LANES == 16 && part.end - part.begin == 1)
    delta_strip<T, Vec, 8>(op, part, head, &token, &column);
  delta_strip<T, Vec, 4>(op, part, head, &token, &column);
  delta_strip<T, Vec, 1>(op, part, head, &token, &column);
  delta_strip<T, float, 1>(op, part, head, &token, &column);
}

inline void delta_rule(Pool& pool, const DeltaRule& op, const States& states) {
  auto piece = [&](int number) {
    int row = number / op.v_heads, head = number % op.v_heads;
    if (op.wide) return delta_head<float>(op, states, row, head);
    delta_head<bf16>(op, states, row, head);
  };
  pool.each_in_order(states.num_rows * op.v_heads, piece);
}

}  // namespace polyhost
