// Weights of four bits in blocks (kernels/int4_blocks.py has their layout and their forms), beside
// rows of x as bytes.
//
// A block is 16 rows and 64 columns: for each of its two groups 16 scales (bf16), and 16 more where
// the form has a scale for each half of a group, or a zero; then eight lines of 64 bytes, each with
// eight columns of 16 rows: four bytes a row, the first four columns in their lower halves, the others
// in the upper ones.
//
// What a code stands for is a byte with a sign; the instruction takes bytes without one, so the table
// has them plus `surplus`. What that adds is the same for all rows of W: the sum of x, `surplus` times.
// Without VNNI, sums are kept in 16 bits for `Kind::RUN` steps: 2 * 127 * largest * RUN < 2^15.
//
// Few rows of x meet the blocks as they lie; more meet panels that are unfolded once for all of them
// (bytes.h). Sums of a group are whole numbers, and `add_group` is the one place that makes floats of
// them: a row's results are the same to the bit either way.

#pragma once

#include "byte_rows.h"
#include "linear.h"

namespace polyhost {

template <int RUN_, bool TABLE_, bool HALVES_, bool ZEROS_>
struct Int4 {
  static constexpr int RUN = RUN_;           // steps of four columns that 16 bits hold
  static constexpr bool TABLE = TABLE_;      // else codes are their bytes
  static constexpr bool HALVES = HALVES_;    // a scale for 16 neighbours
  static constexpr bool ZEROS = ZEROS_;      // a zero for 32 neighbours
  static constexpr bool GROUP_SCALES = true;
  static constexpr int ROWS = 16, COLUMNS = 64, LINE = 64;
  static constexpr int HEADS = HALVES || ZEROS ? 2 : 1;  // of 16 bf16 a group
  static constexpr int HEAD_BYTES = HEADS * COLUMNS / GROUP * ROWS * int(sizeof(bf16));
  static constexpr int BYTES = HEAD_BYTES + COLUMNS / 8 * LINE;
  static constexpr int AHEAD = 8192;  // bytes that are asked for before they are used

  static int64_t panel_bytes(int k) { return int64_t(LANES) * k / 2; }

  static Ints unfold(Ints table, Ints index) {
    if constexpr (TABLE) return look_up(table, index);
    return index;
  }

  // `at` a multiple of COLUMNS. scales [groups, HEADS, LANES].
  static void fill_panel(const Linear& op, int row, int, int at, int count, uint8_t* panel,
                         float* scales) {
    const Ints low = fill_ints(0x0f0f0f0f);
    const Ints table = TABLE ? load_table(op.table) : low;
    int64_t blocks = (op.k + COLUMNS - 1) / COLUMNS;
    const uint8_t* block = static_cast<const uint8_t*>(op.weight) +
                           (row / ROWS * blocks + at / COLUMNS) * BYTES;
    int part = row % ROWS;
    for (int c = 0; c < count; c += COLUMNS, block += BYTES) {
      for (int h = 0; h < HEADS * COLUMNS / GROUP; h++, scales += LANES)
        store(scales, load_bf16(reinterpret_cast<const bf16*>(block) + h * ROWS + part));
      const uint8_t* line = block + HEAD_BYTES + 4 * part;
      const char* ahead = reinterpret_cast<const char*>(block) + AHEAD;
      for (int i = 0; i < BYTES; i += LINE) _mm_prefetch(ahead + i, _MM_HINT_T1);
      for (int i = 0; i < COLUMNS / 8; i++, line += LINE, panel += 2 * QUAD_BYTES) {
        Ints both = load_ints(line);
        store_ints(panel, unfold(table, and_ints(both, low)));
        store_ints(panel + QUAD_BYTES, unfold(table, and_ints(down_ints(both, 4), low)));
      }
    }
  }
};

using Int4Plain = Int4<8, false, false, false>;  // bytes 0 to 15
using Int4Zeros = Int4<8, false, false, true>;
using Int4Table = Int4<4, true, false, false>;   // bytes up to 32
using Int4Halves = Int4<4, true, true, false>;
using Int4Wide = Int4<1, true, false, false>;    // bytes up to 128

// total += a group's products. sums: of its halves, of bytes with `surplus` too much; total_of: what
// the bytes of x in the halves add up to; heads [HEADS, LANES]; scale: x's.
template <class Kind>
inline Vec add_group(Vec total, const Ints* sums, const int32_t* total_of, int surplus,
                     const float* heads, Vec scale) {
  Vec values;
  if constexpr (Kind::HALVES) {
    Vec first = float_of(add_ints(sums[0], fill_ints(-surplus * total_of[0])));
    Vec second = float_of(add_ints(sums[1], fill_ints(-surplus * total_of[1])));
    values = fma(second, load(heads + LANES), mul(first, load(heads)));
  } else {
    int32_t all = total_of[0] + total_of[1];
    values = float_of(add_ints(sums[0], fill_ints(-surplus * all)));
    if constexpr (Kind::ZEROS) values = fma(fill(float(-all)), load(heads + LANES), values);
    if constexpr (Kind::GROUP_SCALES) values = mul(values, load(heads));
  }
  return fma(values, scale, total);
}

constexpr int FEW_BYTE_ROWS = 4;  // rows of x that meet the blocks where they lie

// by_row[r][p] = 16 rows of W with x's row t + r: lanes p * LANES and so on.
template <class Kind, int ROWS>
inline void few_blocks(const Linear& op, const ByteRows& x, int64_t t, int row,
                       Vec (*by_row)[16 / LANES]) {
  constexpr int PARTS = Kind::ROWS / LANES, SUMS = Kind::HALVES ? 2 : 1;
  constexpr int LINES = GROUP / 8;
  const Ints low = fill_ints(0x0f0f0f0f);
  const Ints table = Kind::TABLE ? load_table(op.table) : low;
  int blocks = (op.k + Kind::COLUMNS - 1) / Kind::COLUMNS;
  const uint8_t* block =
      static_cast<const uint8_t*>(op.weight) + int64_t(row / Kind::ROWS) * blocks * Kind::BYTES;
  Vec totals[ROWS][PARTS];
  for (auto& of_row : totals)
    for (Vec& v : of_row) v = zero();
  for (int64_t g = 0; g < x.groups; g++) {
    const uint8_t* line = block + Kind::HEAD_BYTES + (g % 2) * LINES * Kind::LINE;
    const bf16* head = reinterpret_cast<const bf16*>(block) + (g % 2) * Kind::HEADS * Kind::ROWS;
    if (g % 2 == 0)
      for (int i = 0; i < Kind::BYTES; i += Kind::LINE)
        _mm_prefetch(reinterpret_cast<const char*>(block) + Kind::AHEAD + i, _MM_HINT_T0);
    const int8_t* values = x.values + (t * x.groups + g) * GROUP;
    Ints sums[ROWS][PARTS][SUMS], run[ROWS][PARTS];
    for (int i = 0; i < LINES; i++, line += Kind::LINE) {
      constexpr int STEPS = LINES / SUMS;  // lines that go into a sum
      for (int p = 0; p < PARTS; p++) {
        Ints both = load_ints(line + p * 4 * LANES);
        Ints lower = Kind::unfold(table, and_ints(both, low));
        Ints upper = Kind::unfold(table, and_ints(down_ints(both, 4), low));
        for (int r = 0; r < ROWS; r++) {
          const int8_t* of_row = values + r * x.groups * GROUP + 8 * i;
          int32_t four[2];
          std::memcpy(four, of_row, sizeof four);
          Ints& sum = sums[r][p][i / STEPS];
          if constexpr (Kind::RUN == 1 && !WHOLE_BYTES) {
            Ints made = add_ints(sum_of_run(add_run(fill_ints(0), lower, fill_ints(four[0]))),
                                 sum_of_run(add_run(fill_ints(0), upper, fill_ints(four[1]))));
            sum = i % STEPS == 0 ? made : add_ints(sum, made);
          } else {
            constexpr int HELD = WHOLE_BYTES ? STEPS : Kind::RUN / 2;  // in lines
            constexpr int OF_RUN = HELD < STEPS ? HELD : STEPS;
            Ints begun = i % OF_RUN == 0 ? fill_ints(0) : run[r][p];
            run[r][p] = add_run(add_run(begun, lower, fill_ints(four[0])), upper,
                                fill_ints(four[1]));
            if (i % OF_RUN == OF_RUN - 1) {
              Ints made = sum_of_run(run[r][p]);
              sum = i % STEPS < OF_RUN ? made : add_ints(sum, made);
            }
          }
        }
      }
    }
    for (int p = 0; p < PARTS; p++) {
      float heads[Kind::HEADS * LANES];
      for (int h = 0; h < Kind::HEADS; h++)
        store(heads + h * LANES, load_bf16(head + h * Kind::ROWS + p * LANES));
      for (int r = 0; r < ROWS; r++) {
        int64_t at = (t + r) * x.groups + g;
        totals[r][p] = add_group<Kind>(totals[r][p], sums[r][p], x.total + 2 * at, op.surplus,
                                       heads, fill(x.scale[at]));
      }
    }
    if (g % 2) block += Kind::BYTES;
  }
  for (int r = 0; r < ROWS; r++)
    for (int p = 0; p < PARTS; p++) by_row[r][p] = totals[r][p];
}

template <class Kind, int ROWS = FEW_BYTE_ROWS>
inline void few_blocks_any(int rows, const Linear& op, const ByteRows& x, int64_t t, int row,
                           Vec (*by_row)[16 / LANES]) {
  if (rows == ROWS) {
    few_blocks<Kind, ROWS>(op, x, t, row, by_row);
  } else if constexpr (ROWS > 1) {
    few_blocks_any<Kind, ROWS - 1>(rows, op, x, t, row, by_row);
  }
}

// Rows [n_begin, n_end) of y, for rows [t, t + rows) of x.
template <class Kind>
inline void few_blocks_piece(const Linear& op, int activation, const ByteRows& x, int64_t t,
                             int rows, int n_begin, int n_end, const Output& out) {
  for (int n = n_begin; n < n_end; n += Kind::ROWS) {
    Vec sums[FEW_BYTE_ROWS][16 / LANES], ups[FEW_BYTE_ROWS][16 / LANES];
    few_blocks_any<Kind>(rows, op, x, t, n, sums);
    if (activation != NONE) few_blocks_any<Kind>(rows, op, x, t, op.n + n, ups);
    for (int r = 0; r < rows; r++)
      for (int p = 0; p < 16 / LANES; p++)
        finish_row(op, activation, out, t + r, n + p * LANES, LANES, sums[r][p],
                   activation == NONE ? zero() : ups[r][p]);
  }
}

}  // namespace polyhost
