// The layers of a llama-like model over one step's tokens: the calls of kernels/decoder_layer.py,
// all layers in one call from Python. Structures mirror kernels/native_calls.py, field by field.
//
// The library has one pool of threads, and one caller at a time.

#include <unistd.h>

#include <mutex>

#include "attention.h"
#include "bytes.h"
#include "delta_rule.h"
#include "experts.h"
#include "linear.h"
#include "pool.h"
#include "rows.h"
#include "sampling.h"
#include "short_conv.h"
#include "ssd.h"

using namespace polyhost;

namespace {

// Its MLP is gate_up and down; or a mixture; or, where neither is there, the caller's: y is what it
// is given then, and x where its result belongs.
struct Layer {
  Linear qkv, out, gate_up, down;
  const Mixture* mixture;
  Norm input_norm, post_norm, q_norm, k_norm;
  Cache cache;
  AttentionForm form;
  int32_t activation, rotates, interleaved, head_norms;
  float residual_multiplier;
  int32_t group;  // which of the step's groups its rows are
};

// One layer group's rows in this step.
struct Group {
  const Rows* calls;
  const int64_t *token_chunk, *token_slot, *token_offset;  // [T], where K and V go
  int32_t num_calls, reserved;
};

struct Step {
  int64_t num_tokens;
  const float *cos, *sin;  // [T, half]
  const Group* groups;
  bf16 *x, *residual;      // [T, hidden]: in and out
  bf16 *y, *qkv, *attended, *hidden;  // work space
  int32_t half, size, first, reserved;  // `size`: hidden; `first`: there is no residual yet
};

// Never ended with the process: a step may be under way in a thread that nobody waits for, and a
// forked child has none of the threads that would have to be joined.
Pool* pool = nullptr;
pid_t owner = 0;
std::mutex entry;

void resize(int num_threads) {
  if (pool && owner == getpid()) {
    if (pool->num_threads() == num_threads) return;
    delete pool;
  }
  pool = new Pool(num_threads);
  owner = getpid();
}

// One caller's turn; alone where nobody has said how many threads there are.
struct Turn {
  std::lock_guard<std::mutex> lock{entry};
  Turn() {
    if (!pool) resize(1);
  }
};

template <class F>
void each_token(int64_t num_tokens, F f) {
  // A few rows are done before another thread has woken up.
  int64_t rows = std::max<int64_t>(8, num_tokens / (4 * pool->num_threads()));
  auto piece = [&](int number) {
    int64_t end = std::min(num_tokens, (number + 1) * rows);
    for (int64_t t = number * rows; t < end; t++) f(t);
  };
  pool->each(int((num_tokens + rows - 1) / rows), piece);
}

void write_token(const Layer& layer, const Step& step, int64_t t) {
  const Cache& cache = layer.cache;
  const Group& group = step.groups[layer.group];
  int dim = cache.dim, heads = layer.form.num_heads, kv_heads = cache.num_kv_heads;
  bf16* row = step.qkv + t * layer.qkv.n;
  for (int head = 0; head < heads + kv_heads; head++) {
    bf16* values = row + int64_t(head) * dim;
    if (layer.head_norms)
      norm_row(head < heads ? layer.q_norm : layer.k_norm, values, values, dim);
    if (layer.rotates)
      rotate_head(values, step.cos + t * step.half, step.sin + t * step.half, step.half,
                  layer.interleaved);
  }
  int64_t unit = cache.table[group.token_chunk[t]] + group.token_slot[t] * cache.block_units;
  uint8_t* block = const_cast<uint8_t*>(cache.arena) + unit * cache.unit_bytes;
  size_t bytes = size_t(dim) * sizeof(bf16);
  for (int head = 0; head < kv_heads; head++) {
    int64_t place = (int64_t(head) * cache.block_tokens + group.token_offset[t]) * int64_t(bytes);
    std::memcpy(block + place, row + int64_t(heads + head) * dim, bytes);
    std::memcpy(block + cache.v_start_units * cache.unit_bytes + place,
                row + int64_t(heads + kv_heads + head) * dim, bytes);
  }
}

void run_layer(const Layer& layer, const Step& step, bool first) {
  int64_t tokens = step.num_tokens;
  int size = step.size;
  const Group& group = step.groups[layer.group];
  each_token(tokens, [&](int64_t t) {
    add_norm_row(layer.input_norm, step.x + t * size, step.residual + t * size,
                 step.y + t * size, size, layer.residual_multiplier, first);
  });
  linear(*pool, layer.qkv, NONE, step.y, tokens, {step.qkv, layer.qkv.n, false});
  each_token(tokens, [&](int64_t t) { write_token(layer, step, t); });
  attention(*pool, layer.cache, layer.form, group.calls, group.num_calls, step.qkv, layer.qkv.n,
            step.attended);
  linear(*pool, layer.out, NONE, step.attended, tokens, {step.x, size, false});
  each_token(tokens, [&](int64_t t) {
    add_norm_row(layer.post_norm, step.x + t * size, step.residual + t * size, step.y + t * size,
                 size, layer.residual_multiplier, false);
  });
  if (layer.mixture) return mixture(*pool, *layer.mixture, step.y, tokens, step.x);
  if (!layer.down.weight) return;
  linear(*pool, layer.gate_up, layer.activation, step.y, tokens,
         {step.hidden, layer.gate_up.n, false});
  linear(*pool, layer.down, NONE, step.hidden, tokens, {step.x, size, false});
}

}  // namespace

#define EXPORTED __attribute__((visibility("default")))

extern "C" {

// How many threads, the caller among them, and how long they look for work before they sleep.
EXPORTED void polyhost_threads(int num_threads, int spin_rounds) {
  std::lock_guard<std::mutex> lock(entry);
  resize(num_threads);
  pool->set_spin(spin_rounds);
}

// Which sizes fit: heads of a multiple of this many values.
EXPORTED int polyhost_dim_multiple() { return PAIRS; }

// Whether products of int8 weights round x too.
EXPORTED int polyhost_rounds_int8() { return WHOLE_BYTES; }

EXPORTED void polyhost_layers(const Layer* layers, int num_layers, const Step* step) {
  Turn turn;
  for (int i = 0; i < num_layers; i++) run_layer(layers[i], *step, step->first && i == 0);
}

// y [T, n] of x [T, k]; `wide`: y is float32; `rounding`: see linear.
EXPORTED void polyhost_linear(const Linear* op, int activation, const bf16* x, int64_t num_rows, void* y,
                     int wide, int rounding) {
  Turn turn;
  linear(*pool, *op, activation, x, num_rows, {y, op->n, wide != 0}, Rounding(rounding));
}

// y [T, down.n] of x [T, up.k]; chosen, weights [T, top_k].
EXPORTED void polyhost_experts(const Experts* all, const bf16* x, int64_t num_tokens,
                      const int64_t* chosen, const float* weights, int top_k, bf16* y) {
  Turn turn;
  experts(*pool, *all, x, num_tokens, chosen, weights, top_k, y);
}

// The same, chosen by the router.
EXPORTED void polyhost_mixture(const Mixture* all, const bf16* x, int64_t num_tokens, bf16* y) {
  Turn turn;
  mixture(*pool, *all, x, num_tokens, y);
}

EXPORTED void polyhost_attention(const Cache* cache, const AttentionForm* form, const Rows* calls,
                        int num_calls, const bf16* query, int64_t q_stride, bf16* out) {
  Turn turn;
  attention(*pool, *cache, *form, calls, num_calls, query, q_stride, out);
}

// token, broken [num_rows] of logits [num_rows, size], rows a stride apart.
EXPORTED void polyhost_draw(const float* logits, int64_t stride, int num_rows, int size, const Draw* how,
                   int64_t* token, uint8_t* broken) {
  Turn turn;
  draw(*pool, logits, stride, num_rows, size, *how, token, broken);
}

EXPORTED void polyhost_add_norm(const Norm* norm, const bf16* x, bf16* residual, bf16* y, int64_t num_rows,
                       int size, float multiplier, int first) {
  Turn turn;
  each_token(num_rows, [&](int64_t t) {
    add_norm_row(*norm, x + t * size, residual + t * size, y + t * size, size, multiplier,
                 first != 0);
  });
}

// Recurrent mixers, over states in the arena (kernels/native_recurrent.py).
EXPORTED void polyhost_short_conv(const ShortConv* op, const States* states) {
  Turn turn;
  short_conv(*pool, *op, *states);
}

EXPORTED void polyhost_delta_rule(const DeltaRule* op, const States* states) {
  Turn turn;
  delta_rule(*pool, *op, *states);
}

EXPORTED void polyhost_ssd(const Ssd* op, const States* states) {
  Turn turn;
  ssd(*pool, *op, *states);
}

}  // extern "C"
