// Rows of x as bytes, for products with weights of bytes or of four bits (bytes.h, int4.h).
//
// Each GROUP of 32 neighbours has a scale of its own (its largest value is 127 of it), so that one
// large activation costs its neighbours their precision and nobody else. A group with NaN or infinity
// in it has a scale of NaN, and makes its row's results NaN.

#pragma once

#include <algorithm>
#include <cstring>

#include "vec.h"

namespace polyhost {

constexpr int GROUP = 32;              // neighbours of x, and of an int4 weight, that share a scale
constexpr int QUADS = GROUP / 4;       // steps of a panel in a group
constexpr int QUAD_BYTES = 4 * LANES;  // of a panel: a step
constexpr float TINY = 1e-30f;         // groups below are zeros: 127 over them is no float

struct ByteRows {
  const int8_t* values;  // [T, groups * GROUP], zero behind the end
  const float* scale;    // [T, groups]
  const int32_t* total;  // [T, groups, 2]: sums of the bytes of each half of a group
  int64_t groups;
};

// A row of k values.
inline void round_row(const bf16* x, int k, int8_t* values, float* scale, int32_t* total) {
  constexpr int PARTS = GROUP / LANES;
  for (int at = 0, g = 0; at < k; at += GROUP, g++) {
    bf16 end[GROUP] = {};
    const bf16* p = x + at;
    if (at + GROUP > k) {
      std::memcpy(end, p, size_t(k - at) * sizeof(bf16));
      p = end;
    }
    Vec v[PARTS], top = zero(), broken = zero();
    for (int i = 0; i < PARTS; i++) {
      v[i] = load_bf16(p + i * LANES);
      top = maximum(top, maximum(v[i], sub(zero(), v[i])));
      broken = fma(v[i], zero(), broken);
    }
    float most = largest(top), nothing = sum(broken);
    bool fine = nothing == 0.0f && most > TINY;
    Vec by = fill(fine ? 127.0f / most : 0.0f);
    for (int half = 0; half < 2; half++) {
      Ints sums = fill_ints(0);
      for (int i = half * PARTS / 2; i < (half + 1) * PARTS / 2; i++) {
        Ints q = fine ? nearest_ints(mul(v[i], by)) : fill_ints(0);
        sums = add_ints(sums, q);
        store_int8(values + at + i * LANES, q);
      }
      total[2 * g + half] = sum_ints(sums);
    }
    scale[g] = fine ? most / 127.0f : nothing;
  }
}

}  // namespace polyhost
