// A register of float32 lanes and one of bfloat16 pairs: what the kernels compute with.
//
// 16 lanes with AVX-512, 8 with AVX2. Products of pairs are one instruction where the compiler may use
// AVX-512 BF16; elsewhere pairs are widened, which is two products and some shifts. So are products of
// bytes, four a lane, where the compiler may use VNNI; elsewhere they are three. Kernels are written
// once, over `Vec`; nothing outside this file knows the width but by LANES and PAIRS.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace polyhost {

using bf16 = uint16_t;

inline float widen(bf16 value) {
  uint32_t bits = uint32_t(value) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

// Round to nearest, ties to even; NaN stays NaN.
inline bf16 narrow(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16((bits >> 16) | 0x40);
  return bf16((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

#if defined(__AVX512BW__) && defined(__AVX512VL__)

constexpr int LANES = 16;
using Vec = __m512;
using Pairs = __m512i;  // 32 bfloat16: two neighbours a lane
using Ints = __m512i;   // int32, or four bytes a lane

inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec fill(float v) { return _mm512_set1_ps(v); }
// Four values again and again.
inline Vec four(const float* p) { return _mm512_broadcast_f32x4(_mm_loadu_ps(p)); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec divide(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec maximum(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec minimum(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec nearest(Vec a) {
  return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline Vec times_power_of_two(Vec a, Vec exponent) { return _mm512_scalef_ps(a, exponent); }
inline float sum(Vec a) { return _mm512_reduce_add_ps(a); }
inline float largest(Vec a) { return _mm512_reduce_max_ps(a); }
inline Pairs load_pairs(const bf16* p) { return _mm512_loadu_si512(p); }
inline Pairs fill_pairs(uint32_t pair) { return _mm512_set1_epi32(int(pair)); }
inline Pairs bits_of(Vec a) { return _mm512_castps_si512(a); }
inline Vec of_bits(Pairs a) { return _mm512_castsi512_ps(a); }
inline Vec low_of(Pairs a) { return _mm512_castsi512_ps(_mm512_slli_epi32(a, 16)); }
inline Vec high_of(Pairs a) {
  return _mm512_castsi512_ps(_mm512_and_si512(a, _mm512_set1_epi32(int(0xffff0000u))));
}
#ifdef __AVX512BF16__
inline Vec dot_pairs(Vec c, Pairs a, Pairs b) {
  return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b);
}
#else
inline Vec dot_pairs(Vec c, Pairs a, Pairs b) {
  return fma(high_of(a), high_of(b), fma(low_of(a), low_of(b), c));
}
#endif
inline Vec load_bf16(const bf16* p) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline Vec load_int8(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
// To the upper half of each lane, to nearest, ties to even; NaN stays NaN.
inline __m512i rounded(Vec v) {
  __m512i bits = _mm512_castps_si512(v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return _mm512_mask_mov_epi32(up, nan, _mm512_or_si512(bits, _mm512_set1_epi32(0x400000)));
}
inline void store_bf16(bf16* p, Vec v) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded(v), 16)));
}
// Of values that are bfloat16 already.
inline void store_exact(bf16* p, Vec v) {
  __m512i bits = _mm512_srli_epi32(_mm512_castps_si512(v), 16);
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(bits));
}
inline Ints fill_ints(int32_t v) { return _mm512_set1_epi32(v); }
inline Ints load_ints(const void* p) { return _mm512_loadu_si512(p); }
inline void store_ints(void* p, Ints v) { _mm512_storeu_si512(p, v); }
inline Ints add_ints(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints and_ints(Ints a, Ints b) { return _mm512_and_si512(a, b); }
inline Ints xor_ints(Ints a, Ints b) { return _mm512_xor_si512(a, b); }
inline Ints down_ints(Ints a, int bits) { return _mm512_srli_epi32(a, unsigned(bits)); }
inline int32_t sum_ints(Ints a) { return _mm512_reduce_add_epi32(a); }
inline Vec float_of(Ints a) { return _mm512_cvtepi32_ps(a); }
inline Ints nearest_ints(Vec a) { return _mm512_cvtps_epi32(a); }  // ties to even
inline void store_int8(int8_t* p, Ints a) {
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a));
}
// Sixteen bytes, again and again; and which of them each byte names.
inline Ints load_table(const void* p) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p));
}
inline Ints look_up(Ints table, Ints index) { return _mm512_shuffle_epi8(table, index); }
#ifdef __AVX512VNNI__
inline Ints dot_bytes(Ints c, Ints u, Ints s) { return _mm512_dpbusd_epi32(c, u, s); }
inline Ints add_run(Ints run, Ints u, Ints s) { return dot_bytes(run, u, s); }
inline Ints sum_of_run(Ints run) { return run; }
#else
inline Ints dot_bytes(Ints c, Ints u, Ints s) {
  return add_ints(c, _mm512_madd_epi16(_mm512_maddubs_epi16(u, s), _mm512_set1_epi16(1)));
}
inline Ints add_run(Ints run, Ints u, Ints s) {
  return _mm512_add_epi16(run, _mm512_maddubs_epi16(u, s));
}
inline Ints sum_of_run(Ints run) { return _mm512_madd_epi16(run, _mm512_set1_epi16(1)); }
#endif
// Lane i is kept where first <= i < end, else `other`.
inline Vec keep_lanes(Vec v, int first, int end, float other) {
  __mmask16 below = end >= 16 ? 0xffff : __mmask16((1u << (end < 0 ? 0 : end)) - 1);
  __mmask16 before = first <= 0 ? 0 : first >= 16 ? 0xffff : __mmask16((1u << first) - 1);
  return _mm512_mask_mov_ps(_mm512_set1_ps(other), __mmask16(below & ~before), v);
}
// Lanes of at least `least`; the others are zero.
inline Vec at_least(Vec v, Vec least) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(v, least, _CMP_GE_OQ), v);
}
// Four q of the result: the sums of four q of in[0] to in[3].
inline Vec sum_fours(const Vec* in) {
  Vec a = add(_mm512_unpacklo_ps(in[0], in[1]), _mm512_unpackhi_ps(in[0], in[1]));
  Vec b = add(_mm512_unpacklo_ps(in[2], in[3]), _mm512_unpackhi_ps(in[2], in[3]));
  __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
  return add(_mm512_castpd_ps(_mm512_unpacklo_pd(c, d)), _mm512_castpd_ps(_mm512_unpackhi_pd(c, d)));
}
// Four i of out[j] is four j of in[i].
inline void turn_fours(const Vec* in, Vec* out) {
  Vec a = _mm512_shuffle_f32x4(in[0], in[1], 0x88), b = _mm512_shuffle_f32x4(in[2], in[3], 0x88);
  Vec c = _mm512_shuffle_f32x4(in[0], in[1], 0xdd), d = _mm512_shuffle_f32x4(in[2], in[3], 0xdd);
  out[0] = _mm512_shuffle_f32x4(a, b, 0x88);
  out[1] = _mm512_shuffle_f32x4(c, d, 0x88);
  out[2] = _mm512_shuffle_f32x4(a, b, 0xdd);
  out[3] = _mm512_shuffle_f32x4(c, d, 0xdd);
}
// Lanes as a 4 x 4 in each four: lane j of four i of out[k] is lane k of four i of in[j].
inline void turn_in_fours(const Vec* in, Vec* out) {
  __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(in[0], in[1]));
  __m512d b = _mm512_castps_pd(_mm512_unpackhi_ps(in[0], in[1]));
  __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(in[2], in[3]));
  __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(in[2], in[3]));
  out[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
  out[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
  out[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
  out[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
}
// in: LANES fours one after another; lane i of out[j] is lane j of four i. And back.
inline void fours_apart(const Vec* in, Vec* out) {
  Vec turned[4];
  turn_fours(in, turned);
  turn_in_fours(turned, out);
}
inline void fours_together(const Vec* in, Vec* out) {
  Vec turned[4];
  turn_in_fours(in, turned);
  turn_fours(turned, out);
}
// in: LANES rows of one register each; out[j]: lane i is lane j of row i.
inline void transpose(const Pairs* in, Pairs* out) {
  __m512i s[16], t[16];
  for (int i = 0; i < 16; i += 2) {
    s[i] = _mm512_unpacklo_epi32(in[i], in[i + 1]);
    s[i + 1] = _mm512_unpackhi_epi32(in[i], in[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    t[i] = _mm512_unpacklo_epi64(s[i], s[i + 2]);
    t[i + 1] = _mm512_unpackhi_epi64(s[i], s[i + 2]);
    t[i + 2] = _mm512_unpacklo_epi64(s[i + 1], s[i + 3]);
    t[i + 3] = _mm512_unpackhi_epi64(s[i + 1], s[i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    __m512i a = _mm512_shuffle_i32x4(t[i], t[i + 4], 0x88);
    __m512i b = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0x88);
    __m512i c = _mm512_shuffle_i32x4(t[i], t[i + 4], 0xdd);
    __m512i d = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0xdd);
    out[i] = _mm512_shuffle_i32x4(a, b, 0x88);
    out[i + 8] = _mm512_shuffle_i32x4(a, b, 0xdd);
    out[i + 4] = _mm512_shuffle_i32x4(c, d, 0x88);
    out[i + 12] = _mm512_shuffle_i32x4(c, d, 0xdd);
  }
}
#ifdef __AVX512BF16__
// Rows a and b, element by element as pairs: two halves, split as `store_split` joins them.
inline void pair_up(Pairs a, Pairs b, Pairs* low, Pairs* high) {
  *low = _mm512_unpacklo_epi16(a, b);
  *high = _mm512_unpackhi_epi16(a, b);
}
#endif
// PAIRS values as bfloat16 of their halves: as `pair_up` splits rows, or as low_of and high_of do.
inline void store_split(bf16* p, Vec low, Vec high) {
#ifdef __AVX512BF16__
  __m512i both = _mm512_packus_epi32(_mm512_srli_epi32(rounded(low), 16),
                                     _mm512_srli_epi32(rounded(high), 16));
#else
  __m512i both = _mm512_mask_mov_epi16(rounded(high), 0x55555555u,
                                       _mm512_srli_epi32(rounded(low), 16));
#endif
  _mm512_storeu_si512(p, both);
}

#else

constexpr int LANES = 8;
using Vec = __m256;
using Pairs = __m256i;  // 16 bfloat16
using Ints = __m256i;

inline Vec zero() { return _mm256_setzero_ps(); }
inline Vec fill(float v) { return _mm256_set1_ps(v); }
inline Vec four(const float* p) { return _mm256_broadcast_ps((const __m128*)p); }
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec divide(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec maximum(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec minimum(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline Vec nearest(Vec a) {
  return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// Exponents below -126 give zero.
inline Vec times_power_of_two(Vec a, Vec exponent) {
  __m256i e = _mm256_cvtps_epi32(maximum(exponent, fill(-127.0f)));
  __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(e, _mm256_set1_epi32(127)), 23);
  return mul(a, _mm256_castsi256_ps(bits));
}
inline float sum(Vec a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
inline float largest(Vec a) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
}
inline Pairs load_pairs(const bf16* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline Pairs fill_pairs(uint32_t pair) { return _mm256_set1_epi32(int(pair)); }
inline Pairs bits_of(Vec a) { return _mm256_castps_si256(a); }
inline Vec of_bits(Pairs a) { return _mm256_castsi256_ps(a); }
inline Vec low_of(Pairs a) { return _mm256_castsi256_ps(_mm256_slli_epi32(a, 16)); }
inline Vec high_of(Pairs a) {
  return _mm256_castsi256_ps(_mm256_and_si256(a, _mm256_set1_epi32(int(0xffff0000u))));
}
inline Vec dot_pairs(Vec c, Pairs a, Pairs b) {
  return fma(high_of(a), high_of(b), fma(low_of(a), low_of(b), c));
}
inline Vec load_bf16(const bf16* p) {
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline Vec load_int8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
inline __m256i rounded(Vec v) {
  __m256i bits = _mm256_castps_si256(v);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  __m256i kept = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(up, kept, nan);
}
inline void store_bf16(bf16* p, Vec v) {
  __m256i up = _mm256_srli_epi32(rounded(v), 16);
  __m128i low = _mm256_castsi256_si128(up), high = _mm256_extracti128_si256(up, 1);
  _mm_storeu_si128((__m128i*)p, _mm_packus_epi32(low, high));
}
inline void store_exact(bf16* p, Vec v) {
  __m256i bits = _mm256_srli_epi32(_mm256_castps_si256(v), 16);
  __m128i low = _mm256_castsi256_si128(bits), high = _mm256_extracti128_si256(bits, 1);
  _mm_storeu_si128((__m128i*)p, _mm_packus_epi32(low, high));
}
inline Ints fill_ints(int32_t v) { return _mm256_set1_epi32(v); }
inline Ints load_ints(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline void store_ints(void* p, Ints v) { _mm256_storeu_si256((__m256i*)p, v); }
inline Ints add_ints(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
inline Ints and_ints(Ints a, Ints b) { return _mm256_and_si256(a, b); }
inline Ints xor_ints(Ints a, Ints b) { return _mm256_xor_si256(a, b); }
inline Ints down_ints(Ints a, int bits) { return _mm256_srli_epi32(a, bits); }
inline int32_t sum_ints(Ints a) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}
inline Vec float_of(Ints a) { return _mm256_cvtepi32_ps(a); }
inline Ints nearest_ints(Vec a) { return _mm256_cvtps_epi32(a); }
inline void store_int8(int8_t* p, Ints a) {
  __m128i pairs = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(pairs, pairs));
}
inline Ints load_table(const void* p) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
}
inline Ints look_up(Ints table, Ints index) { return _mm256_shuffle_epi8(table, index); }
#ifdef __AVXVNNI__
inline Ints dot_bytes(Ints c, Ints u, Ints s) { return _mm256_dpbusd_avx_epi32(c, u, s); }
inline Ints add_run(Ints run, Ints u, Ints s) { return dot_bytes(run, u, s); }
inline Ints sum_of_run(Ints run) { return run; }
#else
inline Ints dot_bytes(Ints c, Ints u, Ints s) {
  return add_ints(c, _mm256_madd_epi16(_mm256_maddubs_epi16(u, s), _mm256_set1_epi16(1)));
}
inline Ints add_run(Ints run, Ints u, Ints s) {
  return _mm256_add_epi16(run, _mm256_maddubs_epi16(u, s));
}
inline Ints sum_of_run(Ints run) { return _mm256_madd_epi16(run, _mm256_set1_epi16(1)); }
#endif
inline Vec keep_lanes(Vec v, int first, int end, float other) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(end), lane);
  __m256i before = _mm256_cmpgt_epi32(_mm256_set1_epi32(first), lane);
  Vec kept = _mm256_castsi256_ps(_mm256_andnot_si256(before, below));
  return _mm256_blendv_ps(fill(other), v, kept);
}
inline Vec at_least(Vec v, Vec least) {
  return _mm256_and_ps(_mm256_cmp_ps(v, least, _CMP_GE_OQ), v);
}
inline Vec sum_fours(const Vec* in) {
  return _mm256_hadd_ps(_mm256_hadd_ps(in[0], in[1]), _mm256_hadd_ps(in[2], in[3]));
}
inline void turn_fours(const Vec* in, Vec* out) {
  Vec low = _mm256_permute2f128_ps(in[0], in[1], 0x20);
  out[1] = _mm256_permute2f128_ps(in[0], in[1], 0x31);
  out[0] = low;
}
inline void turn_in_fours(const Vec* in, Vec* out) {
  __m256d a = _mm256_castps_pd(_mm256_unpacklo_ps(in[0], in[1]));
  __m256d b = _mm256_castps_pd(_mm256_unpackhi_ps(in[0], in[1]));
  __m256d c = _mm256_castps_pd(_mm256_unpacklo_ps(in[2], in[3]));
  __m256d d = _mm256_castps_pd(_mm256_unpackhi_ps(in[2], in[3]));
  out[0] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, c));
  out[1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, c));
  out[2] = _mm256_castpd_ps(_mm256_unpacklo_pd(b, d));
  out[3] = _mm256_castpd_ps(_mm256_unpackhi_pd(b, d));
}
inline void fours_apart(const Vec* in, Vec* out) {
  Vec turned[4] = {_mm256_permute2f128_ps(in[0], in[2], 0x20),
                   _mm256_permute2f128_ps(in[0], in[2], 0x31),
                   _mm256_permute2f128_ps(in[1], in[3], 0x20),
                   _mm256_permute2f128_ps(in[1], in[3], 0x31)};
  turn_in_fours(turned, out);
}
inline void fours_together(const Vec* in, Vec* out) {
  Vec turned[4];
  turn_in_fours(in, turned);
  out[0] = _mm256_permute2f128_ps(turned[0], turned[1], 0x20);
  out[2] = _mm256_permute2f128_ps(turned[0], turned[1], 0x31);
  out[1] = _mm256_permute2f128_ps(turned[2], turned[3], 0x20);
  out[3] = _mm256_permute2f128_ps(turned[2], turned[3], 0x31);
}
inline void transpose(const Pairs* in, Pairs* out) {
  __m256i s[8], t[8];
  for (int i = 0; i < 8; i += 2) {
    s[i] = _mm256_unpacklo_epi32(in[i], in[i + 1]);
    s[i + 1] = _mm256_unpackhi_epi32(in[i], in[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    t[i] = _mm256_unpacklo_epi64(s[i], s[i + 2]);
    t[i + 1] = _mm256_unpackhi_epi64(s[i], s[i + 2]);
    t[i + 2] = _mm256_unpacklo_epi64(s[i + 1], s[i + 3]);
    t[i + 3] = _mm256_unpackhi_epi64(s[i + 1], s[i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    out[i] = _mm256_permute2x128_si256(t[i], t[i + 4], 0x20);
    out[i + 4] = _mm256_permute2x128_si256(t[i], t[i + 4], 0x31);
  }
}
inline void store_split(bf16* p, Vec low, Vec high) {
  _mm256_storeu_si256((__m256i*)p, _mm256_blend_epi16(rounded(high),
                                                      _mm256_srli_epi32(rounded(low), 16), 0x55));
}

#endif

// One value in place of a register, for what is left where a row is no multiple of LANES: a kernel
// that is a template over `Vec` or `float` computes both.
inline float add(float a, float b) { return a + b; }
inline float sub(float a, float b) { return a - b; }
inline float mul(float a, float b) { return a * b; }
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
template <class V> inline V load_as(const float* p) { return load(p); }
template <> inline float load_as<float>(const float* p) { return *p; }
template <class V> inline V fill_as(float v) { return fill(v); }
template <> inline float fill_as<float>(float v) { return v; }
inline void store(float* p, float v) { *p = v; }

// The two types that values have in memory.
inline Vec load_wide(const float* p) { return load(p); }
inline Vec load_wide(const bf16* p) { return load_bf16(p); }
inline float wide(float value) { return value; }
inline float wide(bf16 value) { return widen(value); }
inline void store_from(float* p, Vec v) { store(p, v); }
inline void store_from(bf16* p, Vec v) { store_bf16(p, v); }
inline void store_exact(float* p, Vec v) { store(p, v); }
inline void store_from(float* p, float v) { *p = v; }
inline void store_from(bf16* p, float v) { *p = narrow(v); }

constexpr int PAIRS = 2 * LANES;  // bfloat16 values in a register of pairs
constexpr int FOURS = LANES / 4;  // in a register

// `dot_bytes`: c + the products of four bytes, without a sign and with one. `add_run`: the same to a
// sum that `sum_of_run` makes whole; without VNNI it is kept in 16 bits meanwhile, and how many steps
// that holds depends on the largest u (int4.h).
//
// Whether `dot_bytes` is right for all bytes. Where it is not, sums of two products are kept in 16
// bits: right for u up to 128.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr bool WHOLE_BYTES = true;
#else
constexpr bool WHOLE_BYTES = false;
#endif

inline void store_pairs(bf16* p, Pairs v) { std::memcpy(p, &v, sizeof v); }

inline uint32_t pair_at(const bf16* p) {
  uint32_t pair;
  std::memcpy(&pair, p, 4);
  return pair;
}

// e^x by 2^n times a polynomial on [-ln2/2, ln2/2]; relative error below 3e-7, 0 far below zero.
// NaN stays NaN: of two operands that cannot be compared the second one is the result.
inline Vec exponential(Vec x) {
  x = minimum(fill(88.0f), maximum(fill(-104.0f), x));
  Vec n = nearest(mul(x, fill(1.44269504f)));
  Vec r = fma(n, fill(-0.693359375f), x);
  r = fma(n, fill(2.12194440e-4f), r);
  Vec p = fill(1.9875691500e-4f);
  p = fma(p, r, fill(1.3981999507e-3f));
  p = fma(p, r, fill(8.3334519073e-3f));
  p = fma(p, r, fill(4.1665795894e-2f));
  p = fma(p, r, fill(1.6666665459e-1f));
  p = fma(p, r, fill(5.0000001201e-1f));
  p = add(fma(mul(p, r), r, r), fill(1.0f));
  return times_power_of_two(p, n);
}

}  // namespace polyhost
