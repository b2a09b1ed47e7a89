// One task of attention over the paged cache, in place: nothing is gathered.
//
// A task is one row's one KV head, some of its queries (a query: a token and one of the heads that
// share the KV head) and a run of its positions. It goes over them SPAN at a time:
//
//     K of LANES positions is turned round once, so that a lane is a position and products of pairs
//     need no sums across lanes;  scores of up to TILE queries together
//     one running maximum a query for the SPAN, and weights
//     V is read row by row where it lies;  outputs of up to TILE queries together
//
// K and V are loaded once for TILE queries, and the rows of the next SPAN are asked for, line by
// line, while this one is computed: blocks lie anywhere, so the processor cannot guess them, and
// asked for all at once they would hold up the loads of this SPAN.
//
// K and V of positions that a query may not see are not read as numbers: scores there are replaced,
// and V behind the last position is not read (freed memory may hold NaN, and 0 * NaN is NaN).

#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "vec.h"

namespace polyhost {

struct Cache {
  const uint8_t* arena;
  const int64_t* table;  // the layer's row: unit at which a chunk begins
  int64_t unit_bytes, block_units, v_start_units;
  int32_t block_tokens, num_kv_heads, dim, window;
};

constexpr int SPAN = 64;         // positions between two looks at the maximum
constexpr int MAX_QUERIES = 32;  // of a task
constexpr int MAX_DIM = 256;
constexpr int TILE = LANES == 16 ? 8 : 4;  // queries that share what is loaded
constexpr int GROUPS = 2;                  // of LANES positions, scored together
constexpr int LINE = 32;                   // values of K or V that come together
constexpr int ASKED = 2 * GROUPS * LANES / LINE;  // lines of K for every pair that is scored
// Positions are attended to in parts that begin at multiples of this, and the parts joined in order.
constexpr int64_t PART = 512;

#ifdef __AVX512BF16__
// A product of pairs is one instruction: K, queries and weights stay pairs of bfloat16.
using Kept = bf16;
using Key = Pairs;
inline void keep(Kept* out, Pairs pairs) { store_pairs(out, pairs); }
inline Key load_key(const Kept* p) { return load_pairs(p); }
inline Vec add_product(Vec acc, Key key, const Kept* query) {
  return dot_pairs(acc, key, fill_pairs(pair_at(query)));
}
inline void keep_query(Kept* out, const bf16* query, int dim) {
  std::memcpy(out, query, size_t(dim) * sizeof(bf16));
}
inline void keep_weights(Kept* out, Vec weights) { store_bf16(out, weights); }
#else
// Pairs would be widened for every product: they are kept widened.
using Kept = float;
struct Key {
  Vec low, high;
};
inline void keep(Kept* out, Pairs pairs) {
  store(out, low_of(pairs));
  store(out + LANES, high_of(pairs));
}
inline Key load_key(const Kept* p) { return {load(p), load(p + LANES)}; }
inline Vec add_product(Vec acc, Key key, const Kept* query) {
  return fma(key.high, fill(query[1]), fma(key.low, fill(query[0]), acc));
}
inline void keep_query(Kept* out, const bf16* query, int dim) {
  for (int d = 0; d < dim; d += LANES) store(out + d, load_bf16(query + d));
}
inline void keep_weights(Kept* out, Vec weights) { store(out, weights); }
#endif

struct Scratch {
  alignas(64) Kept keys[GROUPS][MAX_DIM * LANES];  // [dim pairs] of LANES pairs
  alignas(64) Kept query[MAX_QUERIES][MAX_DIM];
  alignas(64) Kept weights[MAX_QUERIES][SPAN];
  alignas(64) float out[MAX_QUERIES][MAX_DIM];  // in the order of vec.h's split halves
  alignas(64) float scores[MAX_QUERIES][SPAN];
  alignas(64) float sums[MAX_QUERIES][LANES];
  float largest[MAX_QUERIES];
  float joined[MAX_QUERIES][MAX_DIM + 2];  // parts until now: attention.h
  const bf16* rows[2][2][SPAN];  // of this span and the next one: K, V
  const bf16* wanted[GROUPS * LANES * MAX_DIM / LINE];
};

struct Task {
  const Cache& cache;
  const int64_t *chunk, *slot;
  int kv_head, num_queries;
  int64_t first;       // position of the table's first token
  int64_t seen;        // the first position that a query sees
  int64_t begin, end;  // the positions of this task; `begin` a multiple of SPAN
  int64_t low[MAX_QUERIES], high[MAX_QUERIES];  // positions [low, high) of them that a query sees
  float scale, softcap;
};

// K and V of positions [at, at + count). Those before the first one that a query sees are not read:
// that one stands in their place.
inline void find_rows(const Task& task, int64_t at, int count, const bf16** key,
                      const bf16** value) {
  const Cache& c = task.cache;
  if (at < task.seen) {
    int missing = int(task.seen - at);
    find_rows(task, task.seen, count - missing, key + missing, value + missing);
    std::fill_n(key, missing, key[missing]);
    std::fill_n(value, missing, value[missing]);
    return;
  }
  int64_t block = (at - task.first) / c.block_tokens, within = (at - task.first) % c.block_tokens;
  for (int i = 0; i < count; block++, within = 0) {
    int64_t unit = c.table[task.chunk[block]] + task.slot[block] * c.block_units;
    const auto* k = reinterpret_cast<const bf16*>(c.arena + unit * c.unit_bytes);
    const auto* v =
        reinterpret_cast<const bf16*>(c.arena + (unit + c.v_start_units) * c.unit_bytes);
    int64_t skip = int64_t(task.kv_head) * c.block_tokens * c.dim;
    for (; within < c.block_tokens && i < count; within++, i++) {
      key[i] = k + skip + within * c.dim;
      value[i] = v + skip + within * c.dim;
    }
  }
}

// `count` rows of K as [dim pairs] of LANES pairs; behind them zeros.
inline void turn_keys(const bf16* const* rows, int count, int dim, Kept* out) {
  Pairs in[LANES], turned[LANES];
  for (int d = 0; d < dim; d += PAIRS) {
    for (int i = 0; i < LANES; i++) in[i] = i < count ? load_pairs(rows[i] + d) : fill_pairs(0);
    transpose(in, turned);
    for (int i = 0; i < LANES; i++) keep(out + (d / 2 + i) * PAIRS, turned[i]);
  }
}

// scores[q][place...] of QUERIES queries over WIDTH turned groups of keys, whose first position is
// `at`.
template <int QUERIES, int WIDTH>
inline void score(const Task& task, Scratch& s, int q, int place, int64_t at,
                  const bf16* const* wanted) {
  Vec acc[QUERIES][WIDTH];
  for (auto& of_query : acc)
    for (Vec& v : of_query) v = zero();
  for (int d = 0; d < task.cache.dim; d += 2) {
    Key key[WIDTH];
    for (int g = 0; g < WIDTH; g++) key[g] = load_key(s.keys[g] + d * LANES);
    for (int i = 0; i < QUERIES; i++)
      for (int g = 0; g < WIDTH; g++) acc[i][g] = add_product(acc[i][g], key[g], s.query[q + i] + d);
    for (int i = 0; i < ASKED; i++) __builtin_prefetch(*wanted++, 0, 2);
  }
  for (int i = 0; i < QUERIES; i++)
    for (int g = 0; g < WIDTH; g++) {
      Vec v = mul(acc[i][g], fill(task.scale));
      if (task.softcap != 0.0f) {
        float lanes[LANES];
        store(lanes, v);
        for (float& lane : lanes) lane = std::tanh(lane / task.softcap) * task.softcap;
        v = load(lanes);
      }
      int64_t begin = at + g * LANES, low = task.low[q + i] - begin;
      int64_t high = task.high[q + i] - begin;
      if (low > 0 || high < LANES)
        v = keep_lanes(v, int(std::clamp<int64_t>(low, 0, LANES)),
                       int(std::clamp<int64_t>(high, 0, LANES)), -INFINITY);
      store(s.scores[q + i] + place + g * LANES, v);
    }
}

// The scores of one query become weights; what came before is scaled to the new maximum. A score
// that is not a number, or infinite, makes the query's result NaN, as it does in torch: a sequence
// whose memory is broken has to be seen to be.
inline void weigh(Scratch& s, int q, int groups, int dim) {
  Vec top = load(s.scores[q]);
  for (int g = 1; g < groups; g++) top = maximum(top, load(s.scores[q] + g * LANES));
  float before = s.largest[q], now = std::max(before, largest(top));
  if (now > before) {
    Vec by = fill(before == -INFINITY ? 0.0f : std::exp(before - now));
    for (int d = 0; d < dim; d += LANES) store(s.out[q] + d, mul(load(s.out[q] + d), by));
    store(s.sums[q], mul(load(s.sums[q]), by));
    s.largest[q] = now;
  }
  // Until something is seen every weight is 0, but for those of NaN: a maximum may not tell of them.
  Vec total = load(s.sums[q]), shift = fill(now == -INFINITY ? 0.0f : now), never = fill(-1e30f);
  for (int g = 0; g < groups; g++) {
    Vec v = exponential(maximum(never, sub(load(s.scores[q] + g * LANES), shift)));
    keep_weights(s.weights[q] + g * LANES, v);
    total = add(total, v);
  }
  store(s.sums[q], total);
}

// out[q] += weights[q] V for QUERIES queries, PAIRS values of the head from `column` on.
template <int QUERIES>
inline void gather_values(Scratch& s, const bf16* const* rows, int q, int column, int count,
                          const bf16* const* next) {
  Vec low[QUERIES], high[QUERIES];
  for (int i = 0; i < QUERIES; i++) {
    low[i] = load(s.out[q + i] + column);
    high[i] = load(s.out[q + i] + column + LANES);
  }
#ifdef __AVX512BF16__
  for (int p = 0; p < count; p += 2) {
    __builtin_prefetch(next[p] + column, 0, 2);
    __builtin_prefetch(next[p + 1] + column, 0, 2);
    Pairs a, b, other = p + 1 < count ? load_pairs(rows[p + 1] + column) : fill_pairs(0);
    pair_up(load_pairs(rows[p] + column), other, &a, &b);
    for (int i = 0; i < QUERIES; i++) {
      Pairs weight = fill_pairs(pair_at(s.weights[q + i] + p));
      low[i] = dot_pairs(low[i], a, weight);
      high[i] = dot_pairs(high[i], b, weight);
    }
  }
#else
  for (int p = 0; p < count; p++) {
    __builtin_prefetch(next[p] + column, 0, 2);
    Pairs value = load_pairs(rows[p] + column);
    Vec a = low_of(value), b = high_of(value);
    for (int i = 0; i < QUERIES; i++) {
      Vec weight = fill(s.weights[q + i][p]);
      low[i] = fma(a, weight, low[i]);
      high[i] = fma(b, weight, high[i]);
    }
  }
#endif
  for (int i = 0; i < QUERIES; i++) {
    store(s.out[q + i] + column, low[i]);
    store(s.out[q + i] + column + LANES, high[i]);
  }
}

template <int N>
using Number = std::integral_constant<int, N>;

// f(Number<N>, q) with as many queries from q on: tiles, and what is left.
template <int N, class F>
inline void last_tile(int left, int q, F& f) {
  if constexpr (N > 0) {
    if (left == N) {
      f(Number<N>{}, q);
    } else {
      last_tile<N - 1>(left, q, f);
    }
  }
}

template <class F>
inline void by_tiles(int num_queries, F f) {
  int q = 0;
  for (; q + TILE <= num_queries; q += TILE) f(Number<TILE>{}, q);
  last_tile<TILE - 1>(num_queries - q, q, f);
}

inline void attend(const Task& task, Scratch& s) {
  int dim = task.cache.dim;
  for (int q = 0; q < task.num_queries; q++) {
    s.largest[q] = -INFINITY;
    std::memset(s.out[q], 0, sizeof(float) * size_t(dim));
    std::memset(s.sums[q], 0, sizeof s.sums[q]);
  }
  // Behind the last position stands a row that is there: asking for it does nothing.
  auto rows = [&](int64_t at, const bf16* (*found)[SPAN]) {
    int count = int(std::clamp<int64_t>(task.end - at, 0, SPAN));
    if (count) find_rows(task, at, count, found[0], found[1]);
    for (int i = count; i < SPAN; i++) found[0][i] = found[1][i] = s.rows[0][0][0];
    return count;
  };
  int count = rows(task.begin, s.rows[0]);
  for (int64_t at = task.begin, turn = 0; at < task.end; at += SPAN, turn ^= 1) {
    auto &here = s.rows[turn], &ahead = s.rows[turn ^ 1];
    int num_next = rows(at + SPAN, ahead);
    for (int place = 0; place < count; place += GROUPS * LANES) {
      int some = std::min(GROUPS * LANES, count - place);
      bool both = some > LANES;
      turn_keys(here[0] + place, std::min(some, LANES), dim, s.keys[0]);
      if (both) turn_keys(here[0] + place + LANES, some - LANES, dim, s.keys[1]);
      const bf16** line = s.wanted;
      for (int i = place; i < place + GROUPS * LANES; i++)
        for (int d = 0; d < dim; d += LINE) *line++ = ahead[0][i] + d;
      by_tiles(task.num_queries, [&](auto queries, int q) {
        if (both) {
          score<queries.value, 2>(task, s, q, place, at + place, s.wanted);
        } else {
          score<queries.value, 1>(task, s, q, place, at + place, s.wanted);
        }
      });
    }
    int groups = (count + LANES - 1) / LANES;
    for (int q = 0; q < task.num_queries; q++) weigh(s, q, groups, dim);
    for (int column = 0; column < dim; column += PAIRS)
      by_tiles(task.num_queries, [&](auto queries, int q) {
        gather_values<queries.value>(s, here[1], q, column, count, ahead[1]);
      });
    count = num_next;
  }
}

}  // namespace polyhost
