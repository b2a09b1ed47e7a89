// Experts: each row of x goes through those that were chosen for it, y the sum of what they say.
//
// The weights of all experts of a layer are two tensors, one expert behind the other. A pair of a row
// and one of its choices is a slot; slots are sorted by expert, so that an expert's weights meet all
// its rows at once and those of an expert that nobody chose are not touched:
//
//     sorted    the slots' rows of x, behind one another by expert
//     up        one call of the pool: pieces of all experts that were hit
//     gated     act(gate) * up, rounded
//     down      one call more
//     y         a token's slots in the order in which they were chosen, summed in float32
//
// A slot's values depend on its row and its expert alone, and a token's sum on its slots alone, so
// results are the same in any batch. Choices outside [0, num_experts) count as none.
//
// How a product is made is bytes.h's and floats.h's; here only rows and pieces are handed out.

#pragma once

#include <algorithm>
#include <vector>

#include "bytes.h"
#include "floats.h"
#include "linear.h"
#include "pool.h"

namespace polyhost {

// Where gate's rows and up's are among those of one product.
enum GateLayout { HALVES = 0, NEIGHBOURS = 1 };

// act(gate) * (up + shift), gate at most `limit`, up at most that far from zero. SILU: gate *
// sigmoid(alpha * gate).
struct Gate {
  int32_t layout, activation;
  float alpha, limit, shift;
};

// `up`, `down`: of the first expert, the others' weights so many bytes further on each; their
// biases and scales lie without gaps.
struct Experts {
  Linear up, down;
  int64_t up_bytes, down_bytes;
  Gate gate;
  int32_t num_experts;
};

// What x's slots may take of work space, in bytes: tokens beyond are a turn of their own.
constexpr int64_t SLOT_BYTES = 32 * 1024 * 1024;

// The slots [begin, end) of one expert, in their sorted order.
struct Hit {
  int32_t expert;
  int64_t begin, end;
};

inline Linear of_expert(const Linear& first, int64_t bytes, int64_t number) {
  Linear op = first;
  op.weight = static_cast<const uint8_t*>(first.weight) + number * bytes;
  if (op.bias) op.bias += number * op.n;
  if (op.scale) op.scale += number * op.n;
  return op;
}

// Rows [t_begin, t_end) of an expert by rows [n_begin, n_end) of its weight.
struct Piece {
  int32_t expert, n_begin, n_end;
  int64_t t_begin, t_end, block;
};

// All pieces of the experts that were hit: `most_rows` of x, `rows` of W at a time.
inline std::vector<Piece> pieces_of(const std::vector<Hit>& hits, int n, int64_t most_rows,
                                    int rows) {
  std::vector<Piece> pieces;
  int64_t block = 0;
  for (const Hit& hit : hits) {
    int64_t first = block;
    for (int begin = 0; begin < n; begin += rows) {
      block = first;
      for (int64_t t = hit.begin; t < hit.end; t += most_rows, block++)
        pieces.push_back({hit.expert, begin, std::min(n, begin + rows), t,
                          std::min(hit.end, t + most_rows), block});
    }
  }
  return pieces;
}

template <class F>
inline void each_some(Pool& pool, int64_t count, F f) {
  // A few rows are done before another thread has woken up.
  int64_t few = std::max<int64_t>(8, count / (4 * pool.num_threads()));
  auto some = [&](int number) {
    for (int64_t t = number * few; t < std::min(count, (number + 1) * few); t++) f(t);
  };
  pool.each(int((count + few - 1) / few), some);
}

template <class Kind>
inline void byte_experts(Pool& pool, const Linear& first, int64_t bytes,
                         const std::vector<Hit>& hits, const bf16* x, int64_t num_rows,
                         const Output& out) {
  ByteRows rounded = round_rows(pool, x, num_rows, first.k);
  int64_t most_rows = rounded_at_once(first.k);
  auto pieces = pieces_of(hits, first.n, most_rows, rows_of_piece<Kind>(first, NONE));
  auto work = [&](int number) {
    const Piece& piece = pieces[size_t(number)];
    byte_rows_piece<Kind>(of_expert(first, bytes, piece.expert), NONE, rounded, piece.t_begin,
                          piece.t_end, piece.n_begin, piece.n_end, out);
  };
  pool.each_in_order(int(pieces.size()), work);
}

template <class Kind>
inline void float_experts(Pool& pool, const Linear& first, int64_t bytes,
                          const std::vector<Hit>& hits, const bf16* x, const Output& out) {
  thread_local Room<float> room;
  int padded = (first.k + CHUNK - 1) / CHUNK * CHUNK;
  int64_t places = padded / Kind::COLUMNS, row_bytes = places * int64_t(sizeof(float));
  int64_t most_rows = std::clamp<int64_t>(STRIPS_BYTES / row_bytes / (2 * LANES) * 2 * LANES,
                                          2 * LANES, MOST_ROWS);
  int64_t weight_bytes = int64_t(first.k) * int64_t(sizeof(typename Kind::Weight));
  int rows = int(std::max<int64_t>(PIECE_BYTES / 4 / weight_bytes, 1) + LANES - 1) / LANES * LANES;
  std::vector<Strips> blocks;
  int64_t floats = 0;
  for (const Hit& hit : hits)
    for (int64_t t = hit.begin; t < hit.end; t += most_rows) {
      blocks.push_back({t, std::min(most_rows, hit.end - t), places, nullptr});
      floats += blocks.back().count() * blocks.back().size();
    }
  float* values = room.of(floats);
  for (Strips& block : blocks) {
    block.values = values;
    values += block.count() * block.size();
  }
  auto fill = [&](int number) {
    const Strips& block = blocks[size_t(number)];
    for (int64_t strip = 0; strip < block.count(); strip++)
      fill_strip<Kind>(block, strip, x, first.k, 0, padded);
  };
  pool.each(int(blocks.size()), fill);
  auto pieces = pieces_of(hits, first.n, most_rows, rows);
  auto work = [&](int number) {
    const Piece& piece = pieces[size_t(number)];
    const Strips& block = blocks[size_t(piece.block)];
    Linear op = of_expert(first, bytes, piece.expert);
    if (block.few()) {
      few_rows_piece<Kind>(op, NONE, block, piece.n_begin, piece.n_end, out);
    } else {
      float_piece<Kind>(op, NONE, block, piece.n_begin, piece.n_end, out);
    }
  };
  pool.each_in_order(int(pieces.size()), work);
}

// Sorted rows of x, each by its own expert's weight. Chooses as `linear` does.
inline void grouped_linear(Pool& pool, const Linear& first, int64_t bytes,
                           const std::vector<Hit>& hits, const bf16* x, int64_t num_rows,
                           const Output& out) {
  auto in_bytes = [&](auto kind) {
    byte_experts<decltype(kind)>(pool, first, bytes, hits, x, num_rows, out);
  };
  if (as_bytes(first.format, BY_BUILD, in_bytes)) return;
  if (first.format == INT8) return float_experts<Bytes>(pool, first, bytes, hits, x, out);
  float_experts<Brief>(pool, first, bytes, hits, x, out);
}

// y [n] of one slot's gate and up, 2 n floats.
inline void gate_row(const Gate& gate, const float* both, bf16* y, int n) {
  Vec limit = fill(gate.limit), least = sub(zero(), limit), shift = fill(gate.shift);
  for (int at = 0; at < n; at += LANES) {
    int count = std::min(LANES, n - at);
    const int step = gate.layout == HALVES ? 1 : 2, up = gate.layout == HALVES ? n : 1;
    float parts[2][LANES] = {};
    for (int i = 0; i < count; i++) {
      parts[0][i] = both[step * (at + i)];
      parts[1][i] = both[step * (at + i) + up];
    }
    // Of two operands that cannot be compared the second one is the result: NaN stays NaN.
    Vec g = minimum(limit, load(parts[0]));
    Vec u = add(maximum(least, minimum(limit, load(parts[1]))), shift);
    if (gate.activation == SILU) {
      Vec e = exponential(sub(zero(), mul(fill(gate.alpha), g)));
      g = divide(g, add(fill(1.0f), e));
    } else {
      g = activate(g, gate.activation);
    }
    bf16 lanes[LANES];
    store_bf16(lanes, mul(g, u));
    std::memcpy(y + at, lanes, size_t(count) * sizeof(bf16));
  }
}

// y [n] = the weighted sum of a token's slots; place < 0: no expert's.
inline void combine_row(const float* slots, const int64_t* place, const float* weights, int top_k,
                        bf16* y, int n) {
  for (int at = 0; at < n; at += LANES) {
    int count = std::min(LANES, n - at);
    Vec total = zero();
    for (int i = 0; i < top_k; i++) {
      if (place[i] < 0) continue;
      const float* p = slots + place[i] * n + at;
      Vec v = count == LANES ? load(p) : load(Padded<float, LANES>(p, count).values);
      total = fma(fill(weights[i]), v, total);
    }
    bf16 lanes[LANES];
    store_bf16(lanes, total);
    std::memcpy(y + at, lanes, size_t(count) * sizeof(bf16));
  }
}

// Slots by expert. place [num_tokens * top_k]: where each is in that order, -1: nowhere.
inline std::vector<Hit> sort_slots(const int64_t* chosen, int64_t num_slots, int num_experts,
                                   int64_t* place) {
  std::vector<int64_t> next(size_t(num_experts), 0);
  for (int64_t i = 0; i < num_slots; i++)
    if (chosen[i] >= 0 && chosen[i] < num_experts) next[size_t(chosen[i])]++;
  std::vector<Hit> hits;
  int64_t begin = 0;
  for (int e = 0; e < num_experts; e++) {
    int64_t count = next[size_t(e)];
    if (count) hits.push_back({e, begin, begin + count});
    next[size_t(e)] = begin;
    begin += count;
  }
  for (int64_t i = 0; i < num_slots; i++)
    place[i] = chosen[i] >= 0 && chosen[i] < num_experts ? next[size_t(chosen[i])]++ : -1;
  return hits;
}

// Which experts a token goes to: those of the `top_k` largest products, of equal ones the first.
// Their weights are a softmax over all experts, or (`normalize`) over the chosen ones.
struct Router {
  Linear gate;  // [num_experts, k]
  int32_t top_k, normalize;
};

inline void route_row(const Router& router, const float* scores, int64_t* chosen, float* weights) {
  int num = router.gate.n;
  for (int i = 0; i < router.top_k; i++) {
    int best = -1;
    for (int e = 0; e < num; e++)
      if ((best < 0 || scores[e] > scores[best]) && std::find(chosen, chosen + i, e) == chosen + i)
        best = e;
    chosen[i] = best;
  }
  float top = scores[chosen[0]], of_chosen = 0.0f, of_all = 0.0f;
  for (int i = 0; i < router.top_k; i++) {
    weights[i] = std::exp(scores[chosen[i]] - top);
    of_chosen += weights[i];
  }
  // A score that is NaN is never chosen; it shows all the same, as in a softmax over all.
  for (int e = 0; e < num; e++) of_all += std::exp(scores[e] - top);
  float total = router.normalize && of_all == of_all ? of_chosen : of_all;
  for (int i = 0; i < router.top_k; i++) weights[i] /= total;
}

// Rows of x [T, up.k] to y [T, down.n]; y may be x. chosen, weights [T, top_k].
inline void experts(Pool& pool, const Experts& all, const bf16* x, int64_t num_tokens,
                    const int64_t* chosen, const float* weights, int top_k, bf16* y) {
  thread_local Room<bf16> sorted, inner;
  thread_local Room<float> wide, said;
  thread_local Room<int64_t> places;
  const Linear &up = all.up, &down = all.down;
  int64_t slot_bytes = 2 * (up.k + down.k) + 4 * (up.n + down.n);
  int64_t turn = std::max<int64_t>(1, SLOT_BYTES / slot_bytes / top_k);
  for (int64_t t = 0; t < num_tokens; t += turn) {
    int64_t count = std::min(turn, num_tokens - t), slots = count * top_k;
    int64_t* place = places.of(slots);
    auto hits = sort_slots(chosen + t * top_k, slots, all.num_experts, place);
    int64_t hit = hits.empty() ? 0 : hits.back().end;
    bf16 *rows = sorted.of(slots * up.k), *gated = inner.of(slots * down.k);
    float *both = wide.of(slots * up.n), *parts = said.of(slots * down.n);
    each_some(pool, slots, [&](int64_t i) {
      if (place[i] >= 0)
        std::memcpy(rows + place[i] * up.k, x + (t + i / top_k) * up.k, size_t(up.k) * sizeof(bf16));
    });
    grouped_linear(pool, up, all.up_bytes, hits, rows, hit, {both, up.n, true});
    each_some(pool, hit, [&](int64_t i) {
      gate_row(all.gate, both + i * up.n, gated + i * down.k, down.k);
    });
    grouped_linear(pool, down, all.down_bytes, hits, gated, hit, {parts, down.n, true});
    each_some(pool, count, [&](int64_t i) {
      combine_row(parts, place + i * top_k, weights + (t + i) * top_k, top_k,
                  y + (t + i) * down.n, down.n);
    });
  }
}

// A layer's router and experts.
struct Mixture {
  Router router;
  Experts experts;
};

inline void mixture(Pool& pool, const Mixture& all, const bf16* x, int64_t num_tokens, bf16* y) {
  thread_local Room<float> rooms[2];
  thread_local Room<int64_t> places;
  const Router& router = all.router;
  float* scores = rooms[0].of(num_tokens * router.gate.n);
  float* weights = rooms[1].of(num_tokens * router.top_k);
  int64_t* chosen = places.of(num_tokens * router.top_k);
  linear(pool, router.gate, NONE, x, num_tokens, {scores, router.gate.n, true});
  each_some(pool, num_tokens, [&](int64_t t) {
    route_row(router, scores + t * router.gate.n, chosen + t * router.top_k,
              weights + t * router.top_k);
  });
  experts(pool, all.experts, x, num_tokens, chosen, weights, router.top_k, y);
}

}  // namespace polyhost
