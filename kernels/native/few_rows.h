// y = x W^T for up to FEW rows of x: W is read along K where it lies, at the speed of memory.
//
// LANES sums are in registers at once, of some rows of W with every row of x; lines of W that come
// later are asked for meanwhile, in the order in which they lie. A sum's order is the same for any
// number of rows.

#pragma once

#include <algorithm>

#include "linear.h"
#include "strips.h"

namespace polyhost {

// sums[c * ROWS + i] = W's row i (of `rows` <= ROWS that are there) times x's row c, by lanes.
template <class Kind, int ROWS, int COLS>
inline void few_sums(const typename Kind::Weight* w, const float* x, int64_t places, int k, Vec* sums) {
  using Weight = typename Kind::Weight;
  for (int i = 0; i < ROWS * COLS; i++) sums[i] = zero();
  auto columns = [&](int at, int count) {
    Vec left[ROWS][Kind::VECS];
    for (int i = 0; i < ROWS; i++) {
      const Weight* p = w + int64_t(i) * k + at;
      if (count == PAIRS) {
        Kind::load(p, left[i]);
      } else {
        Kind::load(Padded<Weight, PAIRS>(p, count).values, left[i]);
      }
    }
    for (int c = 0; c < COLS; c++)
      for (int v = 0; v < Kind::VECS; v++) {
        Vec right = load(x + c * places + at / Kind::COLUMNS + v * LANES);
        for (int i = 0; i < ROWS; i++)
          sums[c * ROWS + i] = Kind::multiply(sums[c * ROWS + i], left[i][v], right);
      }
  };
  const char* ahead = reinterpret_cast<const char*>(w + int64_t(LANES) * k);
  int at = 0;
  for (; at + PAIRS <= k; at += PAIRS) {
    for (int i = 0; i < ROWS * PAIRS * int(sizeof(Weight)); i += 64)
      _mm_prefetch(ahead + i, _MM_HINT_T1);
    ahead += ROWS * PAIRS * sizeof(Weight);
    columns(at, PAIRS);
  }
  if (at < k) columns(at, k - at);
}

// by_token[c] = the sums of rows [row, row + rows) of W with x's row c.
template <class Kind, int COLS>
inline void few_rows(const Linear& op, const Strips& x, int row, int rows, Vec* by_token) {
  constexpr int ROWS = COLS == 1 ? LANES : COLS == 2 ? LANES / 2 : LANES / 4;
  const auto* w = static_cast<const typename Kind::Weight*>(op.weight) + int64_t(row) * op.k;
  const float* values = x.all[0].values;
  alignas(64) float found[COLS][LANES] = {};
  Vec sums[LANES];
  for (Vec& v : sums) v = zero();
  int i = 0;
  float lanes[LANES];
  for (; i + ROWS <= rows; i += ROWS) {
    few_sums<Kind, ROWS, COLS>(w + int64_t(i) * op.k, values, x.places, op.k, sums);
    store(lanes, sum_each(sums));
    for (int c = 0; c < COLS; c++) std::memcpy(found[c] + i, lanes + c * ROWS, ROWS * sizeof(float));
  }
  for (; i < rows; i++) {
    few_sums<Kind, 1, COLS>(w + int64_t(i) * op.k, values, x.places, op.k, sums);
    store(lanes, sum_each(sums));
    for (int c = 0; c < COLS; c++) found[c][i] = lanes[c];
  }
  for (int c = 0; c < COLS; c++) by_token[c] = load(found[c]);
}

template <class Kind>
inline void few_rows_any(const Linear& op, const Strips& x, int row, int rows, Vec* by_token) {
  switch (x.count) {
    case 1: return few_rows<Kind, 1>(op, x, row, rows, by_token);
    case 2: return few_rows<Kind, 2>(op, x, row, rows, by_token);
    case 3: return few_rows<Kind, 3>(op, x, row, rows, by_token);
    default: return few_rows<Kind, FEW>(op, x, row, rows, by_token);
  }
}

// Rows [n_begin, n_end) of y.
template <class Kind>
inline void few_rows_piece(const Linear& op, int activation, const Strips& x, int n_begin,
                           int n_end, const Output& out) {
  for (int n = n_begin; n < n_end; n += LANES) {
    int rows = std::min(LANES, n_end - n);
    Vec sums[FEW], ups[FEW];
    few_rows_any<Kind>(op, x, n, rows, sums);
    if (activation != NONE) few_rows_any<Kind>(op, x, op.n + n, rows, ups);
    for (int c = 0; c < x.count; c++)
      finish_row(op, activation, out, x.all[c].t, n, rows, sums[c], activation == NONE ? zero() : ups[c]);
  }
}

}  // namespace polyhost
