// How x is laid out for products in floats, and how values are widened.
//
// A strip is LANES rows of x: their values at one place of K side by side, then those at the next.
// Fewer rows are LANES / 2 at two places of K side by side, or LANES / 4 at four. Where x has FEW rows
// or less each is a strip of its own, and nothing is turned.

#pragma once

#include <algorithm>

#include "linear.h"

namespace polyhost {

// A lane has one widened value. bfloat16: the lower ones of PAIRS / 2 pairs, then the upper ones.
struct Halves {
  using Weight = bf16;
  static constexpr int COLUMNS = 1;  // of W, in a lane
  static constexpr int VECS = 2;     // registers that PAIRS columns take
  static Vec multiply(Vec sum, Vec w, Vec x) { return fma(w, x, sum); }
  static void load(const bf16* p, Vec* to) {
    Pairs pairs = load_pairs(p);
    to[0] = low_of(pairs);
    to[1] = high_of(pairs);
  }
  static void load_x(const bf16* p, Vec* to) { load(p, to); }
};

// int8, one after another.
struct Bytes {
  using Weight = int8_t;
  static constexpr int COLUMNS = 1, VECS = 2;
  static Vec multiply(Vec sum, Vec w, Vec x) { return fma(w, x, sum); }
  static void load(const int8_t* p, Vec* to) {
    to[0] = load_int8(p);
    to[1] = load_int8(p + LANES);
  }
  static void load_x(const bf16* p, Vec* to) {
    to[0] = load_bf16(p);
    to[1] = load_bf16(p + LANES);
  }
};

#ifdef __AVX512BF16__
// A lane has a pair, by its bits.
struct Whole {
  using Weight = bf16;
  static constexpr int COLUMNS = 2, VECS = 1;
  static Vec multiply(Vec sum, Vec w, Vec x) { return dot_pairs(sum, bits_of(w), bits_of(x)); }
  static void load(const bf16* p, Vec* to) { to[0] = of_bits(load_pairs(p)); }
  static void load_x(const bf16* p, Vec* to) { load(p, to); }
};
using Brief = Whole;
#else
using Brief = Halves;
#endif

constexpr int CHUNK = 32;           // columns: strips and panels have whole chunks, zeros at the end
// What a block of x may take as strips: as much as the second cache holds well.
constexpr int64_t STRIPS_BYTES = 1024 * 1024;
constexpr int MAX_STRIPS = 64;
// As many rows of x are multiplied where W lies; each is a strip of its own then.
constexpr int FEW = 4;

// `rows` rows of x from `t` on, each at `spread` places of K side by side.
struct Strip {
  int64_t t;
  int rows, spread;
  float* values;  // [places / spread, LANES]
};

// A block of x in strips; `places`: lanes along K that a row has.
struct Strips {
  Strip all[MAX_STRIPS];
  int count = 0;
  int64_t places;

  Strips(int64_t t_begin, int64_t t_end, int64_t places, float* values) : places(places) {
    for (int64_t t = t_begin; t < t_end; t += all[count++].rows) {
      int64_t rest = t_end - t;
      int spread = rest > LANES / 2 ? 1 : rest > LANES / 4 ? 2 : 4;
      if (t_end - t_begin <= FEW) spread = LANES;
      all[count] = {t, int(std::min<int64_t>(rest, LANES / spread)), spread, values};
      values += places / spread * LANES;
    }
  }
};

// Columns [begin, end) of a strip; `begin` a multiple of CHUNK.
template <class Kind>
inline void fill_strip(const Strip& strip, const bf16* x, int k, int begin, int end) {
  for (int at = begin; at < end; at += PAIRS) {
    Vec in[Kind::VECS][LANES];
    for (int i = 0; i < LANES; i++) {
      Vec found[Kind::VECS];
      const bf16* p = x + (strip.t + i) * k + at;
      if (i >= strip.rows || at >= k) {
        for (Vec& v : found) v = zero();
      } else if (at + PAIRS <= k) {
        Kind::load_x(p, found);
      } else {
        Kind::load_x(Padded<bf16, PAIRS>(p, k - at).values, found);
      }
      for (int v = 0; v < Kind::VECS; v++) in[v][i] = found[v];
    }
    int64_t place = at / Kind::COLUMNS;
    for (int v = 0; v < Kind::VECS; v++, place += LANES) {
      if (strip.spread == 1) {
        Pairs bits[LANES], turned[LANES];
        for (int i = 0; i < LANES; i++) bits[i] = bits_of(in[v][i]);
        transpose(bits, turned);
        for (int j = 0; j < LANES; j++)
          store(strip.values + (place + j) * LANES, of_bits(turned[j]));
        continue;
      }
      for (int i = 0; i < LANES / strip.spread; i++) {
        float lanes[LANES];
        store(lanes, in[v][i]);
        for (int j = 0; j < LANES; j += strip.spread)
          std::memcpy(strip.values + (place + j) / strip.spread * LANES + i * strip.spread,
                      lanes + j, size_t(strip.spread) * sizeof(float));
      }
    }
  }
}

}  // namespace polyhost
