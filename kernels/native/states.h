// States of sequences where they lie in the arena, and a step's rows: kernels/mixer_state.py, by
// address. A row without tokens is left alone; a row that begins anew finds zeros.

#pragma once

#include "vec.h"

namespace polyhost {

// Bound of the dimensions of a head: a token has work space on the stack.
constexpr int MAX_STATE_DIM = 512;

struct States {
  uint8_t* arena;
  const int64_t* table;  // [num_pieces, num_chunks], in units
  const int64_t *read_chunk, *read_slot, *write_chunk, *write_slot;  // [num_rows]
  const int64_t* starts;  // [num_rows + 1]
  const uint8_t* fresh;   // [num_rows]
  int64_t num_chunks, unit_bytes, piece_bytes;
  int32_t num_pieces, num_rows;
};

inline uint8_t* piece_of(const States& states, int piece, int64_t chunk, int64_t slot) {
  int64_t units = states.table[piece * states.num_chunks + chunk];
  return states.arena + units * states.unit_bytes + slot * states.piece_bytes;
}

// Asks for what a later token of a chunk brings: its values of a head lie pages behind this token's,
// where no prefetching of the processor's looks. `count` values.
template <class T>
inline void prefetch_row(const T* p, int64_t count) {
  const char* begin = (const char*)p;
  for (const char* line = begin; line < begin + count * int64_t(sizeof(T)); line += 64)
    _mm_prefetch(line, _MM_HINT_T0);
}

// Tokens ahead.
constexpr int AHEAD = 2;

// What one row begins with and where it ends, from one of a state's heads (or channels) on.
template <class T>
struct Part {
  const T* from;  // where the row begins anew: `to`, which holds zeros then
  T* to;
  int64_t begin, end;  // its tokens
};

// `count` heads from `first` on, all in one piece, each of `size` values.
template <class T>
inline Part<T> part_of(const States& states, int row, int first, int count, int num_heads,
                       int64_t size) {
  int64_t begin = states.starts[row], end = states.starts[row + 1];
  if (begin >= end) return {nullptr, nullptr, begin, begin};
  int of_piece = num_heads / states.num_pieces, piece = first / of_piece;
  int64_t place = (first % of_piece) * size * int64_t(sizeof(T));
  auto at = [&](const int64_t* chunk, const int64_t* slot) {
    return (T*)(piece_of(states, piece, chunk[row], slot[row]) + place);
  };
  T* to = at(states.write_chunk, states.write_slot);
  if (!states.fresh[row]) return {at(states.read_chunk, states.read_slot), to, begin, end};
  std::memset(to, 0, size_t(count) * size_t(size) * sizeof(T));
  return {to, to, begin, end};
}

// Asks for what the next row begins with: its slot lies anywhere.
template <class T>
inline void prefetch_part(const States& states, int row, int first, int count, int num_heads,
                          int64_t size) {
  if (states.fresh[row] || states.starts[row] >= states.starts[row + 1]) return;
  int of_piece = num_heads / states.num_pieces, piece = first / of_piece;
  const uint8_t* from = piece_of(states, piece, states.read_chunk[row], states.read_slot[row]);
  prefetch_row((const T*)from + (first % of_piece) * size, count * size);
}

// Blocks of at most `most` heads that lie in one piece: how many, and which heads the n-th has.
struct Blocks {
  int of_piece, most;
  Blocks(const States& states, int num_heads, int most)
      : of_piece(num_heads / states.num_pieces), most(most) {}
  int in_piece() const { return (of_piece + most - 1) / most; }
  int first(int block) const {
    return block / in_piece() * of_piece + block % in_piece() * most;
  }
  int count(int block) const {
    int before = block % in_piece() * most;
    return of_piece - before < most ? of_piece - before : most;
  }
};

}  // namespace polyhost
