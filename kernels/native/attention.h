// Attention of new tokens over the paged cache, in place: nothing is gathered.
//
// The geometry is kernels/paged_attention.py's. A task is one row's one KV head and some of its
// queries (a query: a token and one of the heads that share the KV head); tasks are shared by the
// threads. A task goes over the row's blocks, SPAN positions at a time:
//
//     K of LANES positions is turned round once, so that a lane is a position and products of pairs
//     need no sums across lanes;  scores of all queries of the task
//     one running maximum a query for the SPAN; weights rounded to bfloat16, as torch rounds them
//     V of two positions is made pairs once;  outputs of all queries
//
// K and V of positions that a query may not see are not read as numbers: scores there are replaced,
// and V is put at zero (freed memory may hold NaN, and 0 * NaN is NaN).

#pragma once

#include <algorithm>
#include <cmath>

#include "pool.h"
#include "vec.h"

namespace polyhost {

// One call's rows of equal length; engine/running/batch.py lays them out.
struct Rows {
  const int64_t* token_index;  // [num_rows, q_len], places in the flat batch
  const int64_t* chunk;        // [num_rows, max_blocks], columns of the table
  const int64_t* slot;         // [num_rows, max_blocks]
  const int64_t* context_len;  // [num_rows]
  const int64_t* first;        // [num_rows], position of the first entry's first token
  int32_t num_rows, q_len, max_blocks, reserved;
};

struct Cache {
  const uint8_t* arena;
  const int64_t* table;  // the layer's row: unit at which a chunk begins
  int64_t unit_bytes, block_units, v_start_units;
  int32_t block_tokens, num_kv_heads, dim, window;
};

constexpr int SPAN = 64;         // positions between two looks at the maximum
constexpr int MAX_QUERIES = 32;  // of a task
constexpr int MAX_DIM = 256;

struct Scratch {
  alignas(64) bf16 keys[SPAN / LANES][MAX_DIM / 2 * LANES * 2];  // [dim pairs][LANES] of pairs
  alignas(64) bf16 values[SPAN / 2][MAX_DIM * 2];                // [position pairs][dim] of pairs
  alignas(64) bf16 query[MAX_QUERIES][MAX_DIM];
  alignas(64) float out[MAX_QUERIES][MAX_DIM];
  alignas(64) float scores[MAX_QUERIES][SPAN];
  alignas(64) bf16 weights[MAX_QUERIES][SPAN];
  alignas(64) float sums[MAX_QUERIES][LANES];
  float largest[MAX_QUERIES];
};

struct Task {
  const Cache& cache;
  const int64_t *chunk, *slot;
  int kv_head, num_queries;
  int64_t first, end;  // position of the table's first token; behind the last position
  int64_t low[MAX_QUERIES], high[MAX_QUERIES];  // positions [low, high) that a query sees
  float scale, softcap;
};

inline const bf16* row_of(const Task& task, int64_t position, bool value) {
  const Cache& c = task.cache;
  int64_t place = position - task.first, block = place / c.block_tokens;
  int64_t unit = c.table[task.chunk[block]] + task.slot[block] * c.block_units;
  if (value) unit += c.v_start_units;
  int64_t in_block = task.kv_head * c.block_tokens + place % c.block_tokens;
  return reinterpret_cast<const bf16*>(c.arena + unit * c.unit_bytes) + in_block * c.dim;
}

// Positions [at, at + count) of K as [dim pairs][LANES]; those behind `count` are zero.
inline void turn_keys(const Task& task, int64_t at, int count, bf16* out) {
  int dim = task.cache.dim;
  const bf16* row[LANES];
  for (int i = 0; i < LANES; i++) row[i] = i < count ? row_of(task, at + i, false) : nullptr;
  Pairs in[LANES], turned[LANES];
  for (int d = 0; d < dim; d += PAIRS) {
    for (int i = 0; i < LANES; i++) in[i] = row[i] ? load_pairs(row[i] + d) : fill_pairs(0);
    transpose(in, turned);
    for (int i = 0; i < LANES; i++) store_pairs(out + (d / 2 + i) * PAIRS, turned[i]);
  }
}

// V of positions [at, at + count) as pairs of positions; those behind `count` are zero.
inline void pair_values(const Task& task, int64_t at, int count, bf16 (*out)[MAX_DIM * 2]) {
  int dim = task.cache.dim;
  for (int i = 0; i < count; i += 2) {
    const bf16* a = row_of(task, at + i, true);
    const bf16* b = i + 1 < count ? row_of(task, at + i + 1, true) : nullptr;
    for (int d = 0; d < dim; d += PAIRS) {
      Pairs low, high;
      interleave(load_pairs(a + d), b ? load_pairs(b + d) : fill_pairs(0), &low, &high);
      store_pairs(out[i / 2] + 2 * d, low);
      store_pairs(out[i / 2] + 2 * d + PAIRS, high);
    }
  }
}

inline uint32_t pair_at(const bf16* p) {
  uint32_t pair;
  std::memcpy(&pair, p, 4);
  return pair;
}

// scores[q][...LANES] of QUERIES queries over one turned group of keys.
template <int QUERIES>
inline void score_group(const Task& task, Scratch& s, int q, int group, int64_t at) {
  Vec acc[QUERIES];
  for (int i = 0; i < QUERIES; i++) acc[i] = zero();
  const bf16* keys = s.keys[group];
  for (int d = 0; d < task.cache.dim / 2; d++) {
    Pairs key = load_pairs(keys + d * PAIRS);
    for (int i = 0; i < QUERIES; i++)
      acc[i] = dot_pairs(acc[i], key, fill_pairs(pair_at(s.query[q + i] + 2 * d)));
  }
  for (int i = 0; i < QUERIES; i++) {
    Vec v = mul(acc[i], fill(task.scale));
    if (task.softcap != 0.0f) {
      float lanes[LANES];
      store(lanes, v);
      for (float& lane : lanes) lane = std::tanh(lane / task.softcap) * task.softcap;
      v = load(lanes);
    }
    int64_t low = task.low[q + i] - at, high = task.high[q + i] - at;
    if (low > 0 || high < LANES)
      v = keep_lanes(v, int(std::clamp<int64_t>(low, 0, LANES)),
                     int(std::clamp<int64_t>(high, 0, LANES)), -INFINITY);
    store(s.scores[q + i] + group * LANES, v);
  }
}

// The scores of one query become weights in bfloat16; what came before is scaled to the new maximum.
// A score that is not a number, or infinite, makes the query's result NaN, as it does in torch: a
// sequence whose memory is broken has to be seen to be.
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
    store_bf16(s.weights[q] + g * LANES, v);
    total = add(total, v);
  }
  store(s.sums[q], total);
}

// out[q] += weights[q] V for QUERIES queries, COLUMNS registers of the head at a time.
template <int QUERIES, int COLUMNS>
inline void gather_values(Scratch& s, int q, int column, int pairs) {
  Vec acc[QUERIES][COLUMNS];
  for (int i = 0; i < QUERIES; i++)
    for (int j = 0; j < COLUMNS; j++) acc[i][j] = load(s.out[q + i] + column + j * LANES);
  for (int p = 0; p < pairs; p++) {
    Pairs value[COLUMNS];
    for (int j = 0; j < COLUMNS; j++)
      value[j] = load_pairs(s.values[p] + 2 * column + j * PAIRS);
    for (int i = 0; i < QUERIES; i++) {
      Pairs weight = fill_pairs(pair_at(s.weights[q + i] + 2 * p));
      for (int j = 0; j < COLUMNS; j++) acc[i][j] = dot_pairs(acc[i][j], value[j], weight);
    }
  }
  for (int i = 0; i < QUERIES; i++)
    for (int j = 0; j < COLUMNS; j++) store(s.out[q + i] + column + j * LANES, acc[i][j]);
}

inline void attend(const Task& task, Scratch& s) {
  int dim = task.cache.dim;
  int64_t begin = task.end;
  for (int q = 0; q < task.num_queries; q++) {
    begin = std::min(begin, task.low[q]);
    s.largest[q] = -INFINITY;
    std::memset(s.out[q], 0, sizeof(float) * size_t(dim));
    std::memset(s.sums[q], 0, sizeof s.sums[q]);
  }
  constexpr int COLUMNS = LANES == 16 ? 4 : 2;
  for (int64_t at = begin; at < task.end; at += SPAN) {
    int count = int(std::min<int64_t>(SPAN, task.end - at));
    int groups = (count + LANES - 1) / LANES;
    for (int g = 0; g < groups; g++)
      turn_keys(task, at + g * LANES, std::min(LANES, count - g * LANES), s.keys[g]);
    pair_values(task, at, count, s.values);
    for (int g = 0; g < groups; g++) {
      int q = 0;
      for (; q + 8 <= task.num_queries; q += 8) score_group<8>(task, s, q, g, at + g * LANES);
      for (; q + 2 <= task.num_queries; q += 2) score_group<2>(task, s, q, g, at + g * LANES);
      for (; q < task.num_queries; q++) score_group<1>(task, s, q, g, at + g * LANES);
    }
    for (int q = 0; q < task.num_queries; q++) weigh(s, q, groups, dim);
    int pairs = (count + 1) / 2;
    for (int column = 0; column < dim; column += COLUMNS * LANES) {
      bool whole = column + COLUMNS * LANES <= dim;
      int q = 0;
      if (whole)
        for (; q + 4 <= task.num_queries; q += 4)
          gather_values<4, COLUMNS>(s, q, column, pairs);
      for (; q < task.num_queries; q++) {
        if (whole) {
          gather_values<1, COLUMNS>(s, q, column, pairs);
        } else {
          for (int c = column; c < dim; c += LANES) gather_values<1, 1>(s, q, c, pairs);
        }
      }
    }
  }
}

struct AttentionForm {
  int32_t num_heads;
  float scale, softcap;
};

// query [T, q_stride], head h at h * dim; out [T, heads * dim].
inline void attention(Pool& pool, const Cache& cache, const AttentionForm& form, const Rows* calls,
                      int num_calls, const bf16* query, int64_t q_stride, bf16* out) {
  int group = form.num_heads / cache.num_kv_heads;
  for (int call = 0; call < num_calls; call++) {
    const Rows& rows = calls[call];
    int tokens = std::max(1, std::min<int>(rows.q_len, MAX_QUERIES / group));
    int parts = (rows.q_len + tokens - 1) / tokens;
    int heads = std::min(group, MAX_QUERIES);  // of a task, where one token has more than fit
    int head_parts = (group + heads - 1) / heads;
    auto piece = [&](int number) {
      thread_local Scratch s;
      int part = number % parts, rest = number / parts;
      int head_part = rest % head_parts;
      rest /= head_parts;
      int kv_head = rest % cache.num_kv_heads;
      int64_t row = rest / cache.num_kv_heads;
      int64_t context = rows.context_len[row];
      Task task{cache, rows.chunk + row * rows.max_blocks, rows.slot + row * rows.max_blocks,
                kv_head, 0, rows.first[row], 0, {}, {}, form.scale, form.softcap};
      int64_t targets[MAX_QUERIES];
      int t_end = std::min<int>(rows.q_len, (part + 1) * tokens);
      int h_end = std::min(group, (head_part + 1) * heads);
      for (int t = part * tokens; t < t_end; t++) {
        int64_t high = context - rows.q_len + t + 1;
        int64_t low = cache.window ? std::max<int64_t>(0, high - cache.window) : 0;
        int64_t token = rows.token_index[row * rows.q_len + t];
        for (int h = head_part * heads; h < h_end; h++) {
          int q = task.num_queries++;
          int64_t head = int64_t(kv_head) * group + h;
          task.low[q] = std::max(low, task.first);
          task.high[q] = high;
          task.end = std::max(task.end, high);
          targets[q] = (token * form.num_heads + head) * cache.dim;
          std::memcpy(s.query[q], query + token * q_stride + head * cache.dim,
                      size_t(cache.dim) * sizeof(bf16));
        }
      }
      attend(task, s);
      for (int q = 0; q < task.num_queries; q++) {
        float total = sum(load(s.sums[q]));
        Vec by = fill(total == 0.0f ? 0.0f : 1.0f / total);
        for (int d = 0; d < cache.dim; d += LANES)
          store_bf16(out + targets[q] + d, mul(load(s.out[q] + d), by));
      }
    };
    pool.each(int(rows.num_rows) * cache.num_kv_heads * head_parts * parts, piece);
  }
}

}  // namespace polyhost
