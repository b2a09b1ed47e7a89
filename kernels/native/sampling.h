// One token a row of logits: greedy, or drawn at a given number from what is left of them. The
// definition is kernels/sampling.py's (and so engine/sampling/sampler.py's): the same order, the
// same ties, the same number a row.
//
// A row is one thread's work. Weights are exponentials below the row's largest logit, kept in work
// space; they are summed by segments, so that inverting the distribution reads the sums and one
// segment. A row that cuts its tail first leaves out what cannot stay: for top_k all below the k-th
// largest peak of blocks, for top_p what is so little that all of it together is not the rest. Of
// the others the least that stays is found in a histogram of the upper bits of their floats, which
// order as the floats do; only the bucket where it falls is put in order, by weight and then by id.

#pragma once

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "pool.h"
#include "vec.h"

namespace polyhost {

// How each row is drawn; see kernels/native_calls.py. temperature 0: the largest logit.
struct Draw {
  const float* temperature;
  const double* number;
  const float* min_p;
  const int32_t* top_k;
  const double* top_p;
};

constexpr int SEGMENT = 512;
constexpr int BLOCK = 64;
constexpr int BUCKET_BITS = 18;  // the lower bits of a weight, which its bucket does not tell
constexpr int BUCKETS = (0x3f800000 >> BUCKET_BITS) + 1;  // weights are at most 1

struct SamplingSpace {
  std::vector<float> weights;
  std::vector<double> sums;  // of segments
  struct Bucket {
    double sum;
    int64_t count;
  };
  std::vector<Bucket> buckets;
  std::vector<std::pair<float, int32_t>> near;     // what may stay, by id
  std::vector<std::pair<float, int32_t>> members;  // of one bucket
  std::vector<float> peaks;                        // of blocks
};

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

// The largest of n values; NaN where any is.
inline float peak_of(const float* values, int n) {
  Vec top = fill(-INFINITY), seen = zero();
  int i = 0;
  for (; i + LANES <= n; i += LANES) {
    Vec v = load(values + i);
    top = maximum(top, v);
    seen = fma(v, zero(), seen);  // NaN once v was infinite or none: looked at below
  }
  float peak = largest(top);
  bool odd = std::isnan(sum(seen));
  for (; i < n; i++) {
    odd = odd || !std::isfinite(values[i]);
    peak = std::max(peak, values[i]);
  }
  if (odd)
    for (int j = 0; j < n; j++)
      if (std::isnan(values[j])) return NAN;
  return peak;
}

// The place of the first value that is `peak`.
inline int first_of(const float* values, int n, float peak) {
  for (int i = 0; i < n; i += SEGMENT) {
    int end = std::min(n, i + SEGMENT);
    bool found = false;
    for (int j = i; j < end; j++) found |= values[j] == peak;
    if (!found) continue;
    for (int j = i; j < end; j++)
      if (values[j] == peak) return j;
  }
  return 0;
}

// Weights of all logits, those under `least` 0, and the sums of segments.
inline void weigh_row(const float* logits, int n, float peak, float temperature, float least,
                      SamplingSpace& space) {
  Vec shift = fill(peak), heat = fill(temperature), floor = fill(least);
  float* weights = space.weights.data();
  for (int begin = 0, s = 0; begin < n; begin += SEGMENT, s++) {
    int end = std::min(n, begin + SEGMENT), i = begin;
    Vec some = zero();
    for (; i + LANES <= end; i += LANES) {
      Vec v = at_least(exponential(divide(sub(load(logits + i), shift), heat)), floor);
      store(weights + i, v);
      some = add(some, v);
    }
    if (i < end) {
      // By the same instructions: equal logits have equal weights wherever they stand.
      float rest[LANES];
      std::fill(rest, rest + LANES, -INFINITY);
      std::copy(logits + i, logits + end, rest);
      Vec v = at_least(exponential(divide(sub(load(rest), shift), heat)), floor);
      store(weights + i, v);
      some = add(some, v);
    }
    space.sums[size_t(s)] = double(sum(some));
  }
}

// Where the kept set of a row ends: weights above `least` stay, and those equal to it up to `last`.
struct Edge {
  float least;
  int32_t last;
  double sum;  // of what stays
};

// The edge of the `top_k` largest weights, or of fewer whose sum reaches `target`.
inline Edge edge_of(SamplingSpace& space, int64_t top_k, double target) {
  double before = 0;
  int64_t count = 0;
  int bucket = BUCKETS - 1;
  for (; bucket > 0; bucket--) {
    const auto& b = space.buckets[size_t(bucket)];
    if (count + b.count >= top_k || before + b.sum >= target) break;
    count += b.count;
    before += b.sum;
  }
  auto& members = space.members;
  members.clear();
  for (const auto& [weight, id] : space.near)
    if (int(bits_of(weight) >> BUCKET_BITS) == bucket)
      members.emplace_back(-weight, id);  // the largest first, then by id
  std::sort(members.begin(), members.end());
  for (size_t m = 0; m < members.size(); m++) {
    before += double(-members[m].first);
    count++;
    if (count >= top_k || before >= target || m + 1 == members.size())
      return {-members[m].first, members[m].second, before};
  }
  return {0.0f, INT32_MAX, before};
}

inline float peak_of_block(const float* weights) {
  Vec top = load(weights);
  for (int i = LANES; i < BLOCK; i += LANES) top = maximum(top, load(weights + i));
  return largest(top);
}

// A weight that is not above the `top_k` largest ones; 0 where blocks are too few to tell.
inline float below_largest(SamplingSpace& space, int n, int64_t top_k) {
  auto& peaks = space.peaks;
  peaks.clear();
  for (int i = 0; i < n; i += BLOCK) peaks.push_back(peak_of_block(space.weights.data() + i));
  if (top_k > int64_t(peaks.size())) return 0.0f;
  auto place = peaks.begin() + (top_k - 1);
  std::nth_element(peaks.begin(), place, peaks.end(), std::greater<float>());
  return *place;
}

// What is at least `bound`, and more than nothing: its list, and its buckets.
inline void gather_near(SamplingSpace& space, int n, float bound) {
  space.near.clear();
  std::fill(space.buckets.begin(), space.buckets.end(), SamplingSpace::Bucket{0, 0});
  const float* weights = space.weights.data();
  for (int begin = 0; begin < n; begin += BLOCK) {
    if (peak_of_block(weights + begin) < bound) continue;
    for (int i = begin; i < std::min(n, begin + BLOCK); i++) {
      float weight = weights[i];
      if (weight < bound || weight == 0.0f) continue;
      space.near.emplace_back(weight, i);
      auto& bucket = space.buckets[bits_of(weight) >> BUCKET_BITS];
      bucket.sum += double(weight);
      bucket.count++;
    }
  }
}

// A token of a row that cuts its tail.
inline int draw_cut(SamplingSpace& space, int n, int64_t top_k, double top_p, double number) {
  constexpr double NEVER = 1e300;
  top_k = std::clamp<int64_t>(top_k, 1, n);
  double base = 0;
  for (double part : space.sums) base += part;
  Edge edge{0.0f, INT32_MAX, 0};
  if (top_k < n) {
    gather_near(space, n, below_largest(space, n, top_k));
    edge = edge_of(space, top_k, NEVER);
    base = edge.sum;
  } else {
    gather_near(space, n, float(0.5 * (1.0 - top_p) * base / n));
  }
  if (top_p < 1.0) edge = edge_of(space, top_k, top_p * base);
  auto stays = [&](const std::pair<float, int32_t>& item) {
    return item.first > edge.least || (item.first == edge.least && item.second <= edge.last);
  };
  double total = 0, running = 0;
  for (const auto& item : space.near) total += stays(item) ? double(item.first) : 0.0;
  double target = std::min(number, 1.0 - 0x1p-53) * total;
  int found = 0;
  for (const auto& item : space.near) {
    if (!stays(item)) continue;
    found = item.second;
    running += double(item.first);
    if (running > target) break;
  }
  return found;
}

// The first place where the running sum passes number x the sum of all.
inline int invert_row(const SamplingSpace& space, int n, double number) {
  double total = 0;
  for (double part : space.sums) total += part;
  double target = std::min(number, 1.0 - 0x1p-53) * total, running = 0;
  int last = 0;
  for (int begin = 0, s = 0; begin < n; begin += SEGMENT, s++) {
    double part = space.sums[size_t(s)];
    bool falls = running + part > target;
    if (part > 0.0) last = begin;
    if (falls) break;
    running += part;
  }
  int found = last;
  for (int i = last; i < std::min(n, last + SEGMENT); i++) {
    if (space.weights[size_t(i)] == 0.0f) continue;
    found = i;
    running += double(space.weights[size_t(i)]);
    if (running > target) break;
  }
  return found;
}

inline void draw_row(const float* logits, int n, const Draw& how, int64_t row, int64_t* token,
                     uint8_t* broken) {
  thread_local SamplingSpace space;
  float peak = peak_of(logits, n);
  *broken = !std::isfinite(peak);
  *token = 0;
  if (*broken) return;
  float temperature = how.temperature[row];
  if (temperature <= 0.0f) {
    *token = first_of(logits, n, peak);
    return;
  }
  space.weights.resize(size_t(n + BLOCK));
  space.sums.assign(size_t((n + SEGMENT - 1) / SEGMENT), 0.0);
  space.buckets.resize(BUCKETS);
  weigh_row(logits, n, peak, std::max(temperature, 1.17549435e-38f), how.min_p[row], space);
  std::fill(space.weights.begin() + n, space.weights.end(), 0.0f);
  if (how.top_k[row] < n || how.top_p[row] < 1.0) {
    *token = draw_cut(space, n, how.top_k[row], how.top_p[row], how.number[row]);
  } else {
    *token = invert_row(space, n, how.number[row]);
  }
}

// logits [rows, n], a row `stride` apart; token, broken [rows].
inline void draw(Pool& pool, const float* logits, int64_t stride, int rows, int n, const Draw& how,
                 int64_t* token, uint8_t* broken) {
  auto piece = [&](int row) {
    draw_row(logits + row * stride, n, how, row, token + row, broken + row);
  };
  pool.each(rows, piece);
}

}  // namespace polyhost
