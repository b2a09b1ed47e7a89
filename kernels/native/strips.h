// How values are widened for products in floats, and how x is laid out for them.
//
// A register has FOURS rows at four neighbouring places of K: of x in a strip, of W in few_rows.h.
// Each row's products are summed in four lanes, which are added up at the end.

#pragma once

#include <algorithm>

#include "linear.h"

namespace polyhost {

// PAIRS columns of a row are RAWS registers as they are loaded. Each is VECS / RAWS of widened
// values, at neighbouring places of K. bfloat16: the lower ones of all pairs, then the upper ones.
struct Halves {
  using Weight = bf16;
  static constexpr int COLUMNS = 1;  // of W, in a lane
  static constexpr int RAWS = 1, VECS = 2;
  static Vec multiply(Vec sum, Vec w, Vec x) { return fma(w, x, sum); }
  static void load(const bf16* p, Vec* to) { to[0] = of_bits(load_pairs(p)); }
  static void load_x(const bf16* p, Vec* to) { load(p, to); }
  static Vec widened(const Vec* raw, int v) {
    return v == 0 ? low_of(bits_of(raw[0])) : high_of(bits_of(raw[0]));
  }
};

// int8, one after another.
struct Bytes {
  using Weight = int8_t;
  static constexpr int COLUMNS = 1, RAWS = 2, VECS = 2;
  static Vec multiply(Vec sum, Vec w, Vec x) { return fma(w, x, sum); }
  static void load(const int8_t* p, Vec* to) {
    to[0] = load_int8(p);
    to[1] = load_int8(p + LANES);
  }
  static void load_x(const bf16* p, Vec* to) {
    to[0] = load_bf16(p);
    to[1] = load_bf16(p + LANES);
  }
  static Vec widened(const Vec* raw, int v) { return raw[v]; }
};

#ifdef __AVX512BF16__
// A lane has a pair, by its bits.
struct Whole {
  using Weight = bf16;
  static constexpr int COLUMNS = 2, RAWS = 1, VECS = 1;
  static Vec multiply(Vec sum, Vec w, Vec x) { return dot_pairs(sum, bits_of(w), bits_of(x)); }
  static void load(const bf16* p, Vec* to) { to[0] = of_bits(load_pairs(p)); }
  static void load_x(const bf16* p, Vec* to) { load(p, to); }
  static Vec widened(const Vec* raw, int) { return raw[0]; }
};
using Brief = Whole;
#else
using Brief = Halves;
#endif

constexpr int CHUNK = 32;  // columns: strips and panels have whole chunks, zeros at the end
// What a block of x may take as strips: as much as the second cache holds well.
constexpr int64_t STRIPS_BYTES = 1024 * 1024;
constexpr int64_t MOST_ROWS = 512;
// As many rows of x are multiplied where W lies; each is a strip of its own then, and nothing is
// turned.
constexpr int FEW = 4;

// Rows [t, t + rows) of x, widened: strips [count, places / 4, LANES] of FOURS rows each, the last
// one's missing rows as zeros; or rows [count, places].
struct Strips {
  int64_t t, rows, places;  // `places`: lanes along K that a row has
  float* values;

  bool few() const { return rows <= FEW; }
  int64_t count() const { return few() ? rows : (rows + FOURS - 1) / FOURS; }
  int64_t size() const { return few() ? places : places * FOURS; }  // floats of a strip
};

// PAIRS columns at p of which `count` are there, as they are loaded.
template <class Kind>
inline void load_end(const typename Kind::Weight* p, int count, Vec* raw) {
  if (count >= PAIRS) {
    Kind::load(p, raw);
  } else {
    Kind::load(Padded<typename Kind::Weight, PAIRS>(p, std::max(0, count)).values, raw);
  }
}

// Columns [begin, end) of a strip of x; `begin` a multiple of CHUNK.
template <class Kind>
inline void fill_strip(const Strips& strips, int64_t number, const bf16* x, int k, int begin, int end) {
  int rows = strips.few() ? 1 : FOURS;
  int64_t t = number * rows;
  float* values = strips.values + number * strips.size();
  for (int at = begin; at < end; at += PAIRS) {
    Vec in[Kind::VECS][FOURS];
    for (int i = 0; i < rows; i++) {
      Vec raw[Kind::RAWS];
      const bf16* p = x + (strips.t + t + i) * k + at;
      int count = t + i < strips.rows ? std::clamp(k - at, 0, PAIRS) : 0;
      if (count == PAIRS) {
        Kind::load_x(p, raw);
      } else {
        Kind::load_x(Padded<bf16, PAIRS>(p, count).values, raw);
      }
      for (int v = 0; v < Kind::VECS; v++) in[v][i] = Kind::widened(raw, v);
    }
    int64_t place = at / Kind::COLUMNS;
    for (int v = 0; v < Kind::VECS; v++, place += LANES) {
      if (rows == 1) {
        store(values + place, in[v][0]);
        continue;
      }
      Vec turned[FOURS];
      turn_fours(in[v], turned);
      for (int j = 0; j < FOURS; j++) store(values + place * FOURS + j * LANES, turned[j]);
    }
  }
}

}  // namespace polyhost
