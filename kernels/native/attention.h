// Attention of new tokens over the paged cache: how a step's rows are cut into tasks, and what comes
// of parts joined. The geometry is kernels/paged_attention.py's, a task attention_task.h's.
//
// Tasks are shared by the threads. A row of one token over a long context is cut into parts, so that
// one long sequence is work for all threads and no piece is long. Where it is cut depends on its
// length alone, and parts are joined in their order: a row's result is the same beside any others
// and with any number of threads.

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

// A part of a row's positions: as many as a function of their number says, and of nothing else.
inline int64_t part_of(int64_t positions) {
  int64_t even = (positions + PARTS - 1) / PARTS;
  return std::max(PART, (even + SPAN - 1) / SPAN * SPAN);
}

inline int parts_of(int64_t positions) {
  int64_t part = part_of(positions);
  return int(std::max<int64_t>(1, (positions + part - 1) / part));
}

// What comes of a part of a query's positions: its values, in the order of split halves, their
// maximum and sum.
inline int64_t partial_size(int dim) { return dim + 2; }

inline void put_result(const Scratch& s, int q, int dim, bf16* out) {
  float total = sum(load(s.sums[q]));
  Vec by = fill(total == 0.0f ? 0.0f : 1.0f / total);
  for (int d = 0; d < dim; d += PAIRS)
    store_split(out + d, mul(load(s.out[q] + d), by), mul(load(s.out[q] + d + LANES), by));
}

inline void put_partial(const Scratch& s, int q, int dim, float* partial) {
  std::memcpy(partial, s.out[q], sizeof(float) * size_t(dim));
  partial[dim] = s.largest[q];
  partial[dim + 1] = sum(load(s.sums[q]));
}

inline void join(const float* partials, int parts, int dim, bf16* out) {
  int64_t size = partial_size(dim);
  float top = -INFINITY, total = 0.0f;
  for (int p = 0; p < parts; p++) top = std::max(top, partials[p * size + dim]);
  float by[PARTS];
  for (int p = 0; p < parts; p++) {
    // A part whose maximum is not above all others' may still hold NaN, in its sum.
    float largest = partials[p * size + dim];
    by[p] = largest == -INFINITY ? 1.0f : std::exp(largest - top);
    total += by[p] * partials[p * size + dim + 1];
  }
  Vec share = fill(total == 0.0f ? 0.0f : 1.0f / total);
  for (int d = 0; d < dim; d += PAIRS) {
    Vec low = zero(), high = zero();
    for (int p = 0; p < parts; p++) {
      low = fma(fill(by[p]), load(partials + p * size + d), low);
      high = fma(fill(by[p]), load(partials + p * size + d + LANES), high);
    }
    store_split(out + d, mul(low, share), mul(high, share));
  }
}

// Rows [begin, end) of one call. `partials`: room for what comes of their parts, `most` of them a
// row; null where no row has more than one.
struct Wave {
  const Cache& cache;
  const AttentionForm& form;
  const Rows& rows;
  const Cut& cut;
  int64_t begin, end;
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
    return partials ? parts_of(rows.context_len[row] - low_of_row(row)) : 1;
  }
};

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
  int parts = wave.num_parts(row);
  if (part >= parts) return;
  int64_t context = rows.context_len[row], low_of_row = wave.low_of_row(row);
  Task task{cache,         rows.chunk + row * rows.max_blocks,
            rows.slot + row * rows.max_blocks,
            kv_head,       0,
            rows.first[row], low_of_row, 0, {}, {}, wave.form.scale, wave.form.softcap};
  int64_t stop = context;
  if (parts > 1) {
    int64_t size = part_of(context - low_of_row);
    task.begin = low_of_row + part * size;
    stop = std::min(context, task.begin + size);
  }
  int t_begin = token_part * cut.tokens, t_end = std::min<int>(rows.q_len, t_begin + cut.tokens);
  int h_begin = head_part * cut.heads, h_end = std::min(cut.group, h_begin + cut.heads);
  int64_t from = stop;
  for (int t = t_begin; t < t_end; t++) {
    int64_t high = std::min(stop, context - rows.q_len + t + 1);
    int64_t seen = context - rows.q_len + t + 1;
    int64_t low = cache.window ? std::max<int64_t>(0, seen - cache.window) : 0;
    low = std::max({low, task.first, task.begin});
    from = std::min(from, low);
    task.end = std::max(task.end, high);
    for (int h = h_begin; h < h_end; h++) {
      int q = task.num_queries++;
      task.low[q] = low;
      task.high[q] = high;
      int64_t head = int64_t(kv_head) * cut.group + h;
      int64_t token = rows.token_index[row * rows.q_len + t];
      keep_query(s.query[q], wave.query + token * wave.q_stride + head * cache.dim, cache.dim);
    }
  }
  task.begin = from;
  attend(task, s);
  int q = 0;
  for (int t = t_begin; t < t_end; t++)
    for (int h = h_begin; h < h_end; h++, q++) {
      int64_t head = int64_t(kv_head) * cut.group + h;
      if (parts > 1) {
        put_partial(s, q, cache.dim, wave.partial(row, head, part));
      } else {
        put_result(s, q, cache.dim, wave.out + wave.target(row, t, head));
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
    int most = 1;
    if (rows.q_len == 1)
      for (int64_t row = 0; row < rows.num_rows; row++)
        most = std::max(most, parts_of(rows.context_len[row] - rows.first[row]));
    int64_t row_size = most > 1 ? form.num_heads * most * partial_size(cache.dim) : 0;
    int64_t at_once = row_size ? std::max<int64_t>(1, PARTIALS / row_size) : rows.num_rows;
    if (row_size) room.resize(size_t(std::min<int64_t>(at_once, rows.num_rows) * row_size));
    for (int64_t begin = 0; begin < rows.num_rows; begin += at_once) {
      int64_t end = std::min<int64_t>(rows.num_rows, begin + at_once);
      Wave wave{cache, form, rows,  cut,      begin, end, most, row_size ? room.data() : nullptr,
                query, q_stride, out};
      auto piece = [&](int number) { attend_piece(wave, number); };
      pool.each(int(end - begin) * cache.num_kv_heads * cut.head_parts * cut.token_parts * most,
                piece);
      if (!row_size) continue;
      auto join_row = [&](int number) {
        int64_t row = begin + number;
        int parts = wave.num_parts(row);
        if (parts == 1) return;
        for (int64_t head = 0; head < form.num_heads; head++)
          join(wave.partial(row, head, 0), parts, cache.dim, out + wave.target(row, 0, head));
      };
      pool.each(int(end - begin), join_row);
    }
  }
}

}  // namespace polyhost
