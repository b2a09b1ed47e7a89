// y = x W^T for up to FEW rows of x: W is read along K where it lies, at the speed of memory.
//
// Four registers have the sums of LANES rows of W with a row of x: register i rows i, i + 4 and so on,
// at four places of K. Lines of W that come later are asked for meanwhile, in the order in which they
// lie. The order of a sum is that of floats.h.

#pragma once

#include <algorithm>

#include "linear.h"
#include "strips.h"

namespace polyhost {

// by_token[c] = the sums of LANES rows of W, `rows` of them there, with x's row c.
template <class Kind, int COLS>
inline void few_rows(const Linear& op, const Strips& x, int row, int rows, Vec* by_token) {
  using Weight = typename Kind::Weight;
  // Of rows of W, summed at once: as many as registers and streams of memory bear.
  constexpr int SETS = COLS == 1 ? 4 / Kind::RAWS : COLS == FEW ? 1 : 2;
  constexpr int BYTES = SETS * FOURS * PAIRS * int(sizeof(Weight));
  const Weight* w = static_cast<const Weight*>(op.weight) + int64_t(row) * op.k;
  const char* ahead = reinterpret_cast<const char*>(w + int64_t(LANES) * op.k);
  Vec sums[COLS][4];
  for (auto& of_row : sums)
    for (Vec& v : of_row) v = zero();
  for (int set = 0; set < 4; set += SETS) {
    const Weight* begin[SETS][FOURS];
    for (int i = 0; i < SETS; i++)
      for (int r = 0; r < FOURS; r++)
        begin[i][r] = w + int64_t(std::min(4 * r + set + i, rows - 1)) * op.k;
    auto columns = [&](int at, auto load) {
      Vec raw[SETS][FOURS][Kind::RAWS];
      for (int i = 0; i < SETS; i++) {
        Vec in[FOURS][Kind::RAWS];
        for (int r = 0; r < FOURS; r++) load(begin[i][r] + at, in[r]);
        for (int n = 0; n < Kind::RAWS; n++) {
          Vec rows_of[FOURS], turned[FOURS];
          for (int r = 0; r < FOURS; r++) rows_of[r] = in[r][n];
          turn_fours(rows_of, turned);
          for (int j = 0; j < FOURS; j++) raw[i][j][n] = turned[j];
        }
      }
      for (int v = 0; v < Kind::VECS; v++)
        for (int j = 0; j < FOURS; j++) {
          Vec left[SETS];
          for (int i = 0; i < SETS; i++) left[i] = Kind::widened(raw[i][j], v);
          const float* place = x.values + at / Kind::COLUMNS + v * LANES + j * 4;
          for (int c = 0; c < COLS; c++) {
            Vec right = four(place + c * x.places);
            for (int i = 0; i < SETS; i++)
              sums[c][set + i] = Kind::multiply(sums[c][set + i], left[i], right);
          }
        }
    };
    int at = 0;
    for (; at + PAIRS <= op.k; at += PAIRS) {
      for (int i = 0; i < BYTES; i += 64) _mm_prefetch(ahead + i, _MM_HINT_T1);
      ahead += BYTES;
      columns(at, Kind::load);
    }
    if (at < op.k)
      columns(at, [&](const Weight* p, Vec* raw) { load_end<Kind>(p, op.k - at, raw); });
  }
  for (int c = 0; c < COLS; c++) by_token[c] = sum_fours(sums[c]);
}

template <class Kind>
inline void few_rows_any(const Linear& op, const Strips& x, int row, int rows, Vec* by_token) {
  switch (x.rows) {
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
    for (int c = 0; c < x.rows; c++)
      finish_row(op, activation, out, x.t + c, n, rows, sums[c], activation == NONE ? zero() : ups[c]);
  }
}

}  // namespace polyhost
