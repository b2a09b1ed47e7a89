// Attention of new tokens over the paged cache: how a step's rows are cut into tasks, and what comes
// of parts joined. The geometry is kernels/paged_attention.py's, a task attention_task.h's.
//
// Tasks are shared by the threads. Every query joins the same parts of positions in the same order,
// cut at multiples of PART: one after another in a task that has several tokens, and where a row is
// one token each part is a task, so that one long sequence is work for all threads and no piece is
// long. A token's result is the same to the bit beside any others, in a chunk of any length, and with
// any number of threads.

#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention_task.h"
#include "pool.h"

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

struct AttentionForm {
  int32_t num_heads;
  float scale, softcap;
};

// How a call's rows are cut into tasks.
struct Cut {
  int group, tokens, token_parts, heads, head_parts;

  Cut(const Rows& rows, int num_heads, int num_kv_heads) {
    group = num_heads / num_kv_heads;
    tokens = std::max(1, std::min<int>(rows.q_len, MAX_QUERIES / group));
    token_parts = (rows.q_len + tokens - 1) / tokens;
    heads = std::min(group, MAX_QUERIES);  // of a task, where one token has more than fit
    head_parts = (group + heads - 1) / heads;
  }
};

// What comes of a query's positions: its values, in the order of split halves, their maximum and sum.
inline int64_t partial_size(int dim) { return dim + 2; }

inline void begin_join(float* joined, int dim) {
  std::memset(joined, 0, sizeof(float) * size_t(partial_size(dim)));
  joined[dim] = -INFINITY;
}

// Two runs of positions become one, in `joined`.
inline void join(float* joined, const float* partial, int dim) {
  float before = joined[dim], here = partial[dim], top = std::max(before, here);
  // A part of which nothing is seen may still hold NaN, in its sum.
  float keep = before == top ? 1.0f : std::exp(before - top);
  float take = here == top || here == -INFINITY ? 1.0f : std::exp(here - top);
  for (int d = 0; d < dim; d += LANES)
    store(joined + d,
          fma(fill(take), load(partial + d), mul(fill(keep), load(joined + d))));
  joined[dim] = top;
  joined[dim + 1] = joined[dim + 1] * keep + partial[dim + 1] * take;
}

inline void put_joined(const float* joined, int dim, bf16* out) {
  float total = joined[dim + 1];
  Vec by = fill(total == 0.0f ? 0.0f : 1.0f / total);
  for (int d = 0; d < dim; d += PAIRS)
    store_split(out + d, mul(load(joined + d), by), mul(load(joined + d + LANES), by));
}

inline void put_partial(const Scratch& s, int q, int dim, float* partial) {
  std::memcpy(partial, s.out[q], sizeof(float) * size_t(dim));
  partial[dim] = s.largest[q];
  partial[dim + 1] = sum(load(s.sums[q]));
}

// Rows from `begin` on of one call. `partials`: room for what comes of their parts, `most` of them a
// row; null where no row has more than one.
struct Wave {
  const Cache& cache;
  const AttentionForm& form;
  const Rows& rows;
  const Cut& cut;
  int64_t begin;
  int most;
  float* partials;
  const bf16* query;
  int64_t q_stride;
  bf16* out;

  int64_t target(int64_t row, int t, int64_t head) const {
    return (rows.token_index[row * rows.q_len + t] * form.num_heads + head) * cache.dim;
  }
  // Of a row of one token.
  float* partial(int64_t row, int64_t head, int part) const {
    return partials + (((row - begin) * form.num_heads + head) * most + part) *
                          partial_size(cache.dim);
  }
  int64_t low_of_row(int64_t row) const {
    int64_t high = rows.context_len[row] - rows.q_len + 1;
    int64_t low = cache.window ? std::max<int64_t>(0, high - cache.window) : 0;
    return std::max(low, rows.first[row]);
  }
  int num_parts(int64_t row) const {
    return int((rows.context_len[row] - 1) / PART - low_of_row(row) / PART + 1);
  }
};

// Queries of one KV head over part `part` of the row's positions, or over all of them.
inline void attend_piece(const Wave& wave, int64_t number) {
  thread_local Scratch s;
  const Rows& rows = wave.rows;
  const Cut& cut = wave.cut;
  const Cache& cache = wave.cache;
  int part = int(number % wave.most);
  number /= wave.most;
  int token_part = int(number % cut.token_parts);
  number /= cut.token_parts;
  int head_part = int(number % cut.head_parts);
  number /= cut.head_parts;
  int kv_head = int(number % cache.num_kv_heads);
  int64_t row = wave.begin + number / cache.num_kv_heads;
  if (part >= wave.num_parts(row)) return;
  int64_t context = rows.context_len[row];
  Task task{cache,         rows.chunk + row * rows.max_blocks,
            rows.slot + row * rows.max_blocks,
            kv_head,       0,
            rows.first[row], 0, 0, 0, {}, {}, wave.form.scale, wave.form.softcap};
  int t_begin = token_part * cut.tokens, t_end = std::min<int>(rows.q_len, t_begin + cut.tokens);
  int h_begin = head_part * cut.heads, h_end = std::min(cut.group, h_begin + cut.heads);
  int64_t from = context, stop = 0;
  for (int t = t_begin; t < t_end; t++) {
    int64_t high = context - rows.q_len + t + 1;
    int64_t low = cache.window ? std::max<int64_t>(0, high - cache.window) : 0;
    low = std::max(low, task.first);
    from = std::min(from, low);
    stop = std::max(stop, high);
    for (int h = h_begin; h < h_end; h++) {
      int q = task.num_queries++;
      task.low[q] = low;
      task.high[q] = high;
      int64_t head = int64_t(kv_head) * cut.group + h;
      int64_t token = rows.token_index[row * rows.q_len + t];
      keep_query(s.query[q], wave.query + token * wave.q_stride + head * cache.dim, cache.dim);
      begin_join(s.joined[q], cache.dim);
    }
  }
  task.seen = from;
  int64_t first_part = from / PART, last_part = (stop - 1) / PART;
  if (wave.partials) first_part = last_part = first_part + part;
  float partial[MAX_DIM + 2];
  for (int64_t i = first_part; i <= last_part; i++) {
    task.begin = std::max(i * PART, from / SPAN * SPAN);
    task.end = std::min((i + 1) * PART, stop);
    attend(task, s);
    for (int q = 0; q < task.num_queries; q++) {
      put_partial(s, q, cache.dim, partial);
      join(s.joined[q], partial, cache.dim);
    }
  }
  int q = 0;
  for (int t = t_begin; t < t_end; t++)
    for (int h = h_begin; h < h_end; h++, q++) {
      int64_t head = int64_t(kv_head) * cut.group + h;
      if (wave.partials) {
        std::memcpy(wave.partial(row, head, part), s.joined[q],
                    sizeof(float) * size_t(partial_size(cache.dim)));
      } else {
        put_joined(s.joined[q], cache.dim, wave.out + wave.target(row, t, head));
      }
    }
}

// Room for partial results, in floats, unless one row needs more.
constexpr int64_t PARTIALS = 1 << 20;

// query [T, q_stride], head h at h * dim; out [T, heads * dim].
inline void attention(Pool& pool, const Cache& cache, const AttentionForm& form, const Rows* calls,
                      int num_calls, const bf16* query, int64_t q_stride, bf16* out) {
  thread_local std::vector<float> room;
  for (int call = 0; call < num_calls; call++) {
    const Rows& rows = calls[call];
    Cut cut(rows, form.num_heads, cache.num_kv_heads);
    Wave wave{cache, form, rows, cut, 0, 1, nullptr, query, q_stride, out};
    if (rows.q_len == 1)
      for (int64_t row = 0; row < rows.num_rows; row++)
        wave.most = std::max(wave.most, wave.num_parts(row));
    int most = wave.most;
    int64_t row_size = most > 1 ? form.num_heads * most * partial_size(cache.dim) : 0;
    int64_t at_once = row_size ? std::max<int64_t>(1, PARTIALS / row_size) : rows.num_rows;
    if (row_size) room.resize(size_t(std::min<int64_t>(at_once, rows.num_rows) * row_size));
    for (int64_t begin = 0; begin < rows.num_rows; begin += at_once) {
      int64_t end = std::min<int64_t>(rows.num_rows, begin + at_once);
      wave.begin = begin;
      wave.partials = row_size ? room.data() : nullptr;
      auto piece = [&](int number) { attend_piece(wave, number); };
      pool.each(int(end - begin) * cache.num_kv_heads * cut.head_parts * cut.token_parts * most,
                piece);
      if (!row_size) continue;
      auto join_row = [&](int number) {
        int64_t row = begin + number;
        int parts = wave.num_parts(row);
        for (int64_t head = 0; head < form.num_heads; head++) {
          float* joined = wave.partial(row, head, 0);
          for (int i = 1; i < parts; i++) join(joined, wave.partial(row, head, i), cache.dim);
          put_joined(joined, cache.dim, out + wave.target(row, 0, head));
        }
      };
      pool.each(int(end - begin), join_row);
    }
  }
}

}  // namespace polyhost
