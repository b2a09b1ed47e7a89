// What happens to one token's row: norms, head norms, rotation, and K and V into the cache.

#pragma once

#include <cmath>

#include "vec.h"

namespace polyhost {

struct Norm {
  const bf16* weight;  // [n] or null
  float eps;
  int32_t unit_offset;  // 1: the factor is 1 + weight
  int32_t center;       // 1: the mean is subtracted first
};

inline float factor(const Norm& norm, int i) {
  if (!norm.weight) return 1.0f;
  return widen(norm.weight[i]) + (norm.unit_offset ? 1.0f : 0.0f);
}

// y = norm(row) of n values, as kernels/rms_norm.py defines it: float32 inside, rounded once. y may
// be the row itself.
inline void norm_row(const Norm& norm, const bf16* row, bf16* y, int n) {
  int i = 0;
  float mean = 0.0f;
  if (norm.center) {
    Vec total = zero();
    for (; i + LANES <= n; i += LANES) total = add(total, load_bf16(row + i));
    mean = sum(total);
    for (; i < n; i++) mean += widen(row[i]);
    mean /= float(n);
  }
  Vec total = zero(), shift = fill(mean);
  for (i = 0; i + LANES <= n; i += LANES) {
    Vec v = sub(load_bf16(row + i), shift);
    total = fma(v, v, total);
  }
  float square = sum(total);
  for (; i < n; i++) square += (widen(row[i]) - mean) * (widen(row[i]) - mean);
  float scale = 1.0f / std::sqrt(square / float(n) + norm.eps);
  Vec by = fill(scale), offset = fill(norm.unit_offset ? 1.0f : 0.0f);
  for (i = 0; i + LANES <= n; i += LANES) {
    Vec v = mul(sub(load_bf16(row + i), shift), by);
    if (norm.weight) v = mul(v, add(load_bf16(norm.weight + i), offset));
    store_bf16(y + i, v);
  }
  for (; i < n; i++) y[i] = narrow((widen(row[i]) - mean) * scale * factor(norm, i));
}

// residual += multiplier * x, rounded; y = norm(residual). `first`: there is no residual yet.
inline void add_norm_row(const Norm& norm, const bf16* x, bf16* residual, bf16* y, int n,
                         float multiplier, bool first) {
  if (first) {
    std::memcpy(residual, x, size_t(n) * sizeof(bf16));
  } else {
    int i = 0;
    Vec by = fill(multiplier);
    for (; i + LANES <= n; i += LANES)
      store_bf16(residual + i, fma(by, load_bf16(x + i), load_bf16(residual + i)));
    for (; i < n; i++) residual[i] = narrow(widen(residual[i]) + multiplier * widen(x[i]));
  }
  norm_row(norm, residual, y, n);
}

// Rotates the first 2 * half values of a head, float32 inside, rounded once. cos, sin [half]: of
// halves, or of pairs of neighbours.
inline void rotate_head(bf16* head, const float* cos, const float* sin, int half,
                        bool interleaved) {
  int i = 0;
  if (!interleaved) {
    for (; i + LANES <= half; i += LANES) {
      Vec u = load_bf16(head + i), v = load_bf16(head + half + i);
      Vec c = load(cos + i), s = load(sin + i);
      store_bf16(head + i, sub(mul(u, c), mul(v, s)));
      store_bf16(head + half + i, add(mul(v, c), mul(u, s)));
    }
  }
  for (; i < half; i++) {
    int a = interleaved ? 2 * i : i, b = interleaved ? 2 * i + 1 : i + half;
    float u = widen(head[a]), v = widen(head[b]);
    head[a] = narrow(u * cos[i] - v * sin[i]);
    head[b] = narrow(v * cos[i] + u * sin[i]);
  }
}

}  // namespace polyhost
