// Sixteen lanes at a time, on any machine: GCC and Clang cut vectors that are wider than the machine's registers. What has no
// spelling in that language (dot products of small numbers) has a branch for each instruction set, and a plain loop.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace nonet {

typedef float F16 __attribute__((vector_size(64)));
typedef int32_t I16 __attribute__((vector_size(64)));
typedef uint32_t U16 __attribute__((vector_size(64)));
typedef uint16_t H16 __attribute__((vector_size(32)));
typedef int8_t B16 __attribute__((vector_size(16)));

#define INLINE static inline __attribute__((always_inline))
#define MEMBER inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

template <class V>
INLINE V load(const void* from) {
  V value;
  memcpy(&value, from, sizeof value);
  return value;
}
template <class V>
INLINE void store(void* to, V value) {
  memcpy(to, &value, sizeof value);
}
INLINE F16 zeros() { return F16{}; }
INLINE F16 all(float value) { return F16{} + value; }
INLINE I16 all_int(int32_t value) { return I16{} + value; }
INLINE F16 as_float(I16 bits) { return (F16)bits; }
INLINE F16 max(F16 a, F16 b) { return a > b ? a : b; }
INLINE F16 min(F16 a, F16 b) { return a < b ? a : b; }
INLINE F16 to_float(I16 value) { return __builtin_convertvector(value, F16); }

INLINE float sum(F16 value) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)value);
#else
  float half[8];
  for (int i = 0; i < 8; i++) half[i] = value[i] + value[i + 8];
  return ((half[0] + half[4]) + (half[2] + half[6])) + ((half[1] + half[5]) + (half[3] + half[7]));
#endif
}
INLINE float largest(F16 value) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)value);
#else
  float most = value[0];
  for (int i = 1; i < 16; i++) most = value[i] > most ? value[i] : most;
  return most;
#endif
}
INLINE bool has_nan(F16 a, F16 b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_UNORD_Q) != 0;
#else
  I16 found = (a != a) | (b != b);
  int32_t any = 0;
  UNROLL for (int i = 0; i < 16; i++) any |= found[i];
  return any != 0;
#endif
}
INLINE int32_t sum(I16 value) {
  int32_t total = 0;
  UNROLL for (int i = 0; i < 16; i++) total += value[i];
  return total;
}

// To the nearest, ties to even; |value| < 2^22.
INLINE F16 rounded(F16 value) {
  const float magic = 12582912.0f;
  return (value + magic) - magic;
}

// e^value, relative error about 2e-7. 0 below -87, and never infinite. NaN stays NaN.
INLINE F16 exp(F16 value) {
  F16 bounded = min(max(value, all(-87.0f)), all(87.0f));
  F16 steps = rounded(bounded * 1.44269504f);
  F16 rest = bounded - steps * 0.693145752f - steps * 1.42860677e-6f;
  F16 series = all(1.3981999e-3f);
  series = series * rest + 8.3334519e-3f;
  series = series * rest + 4.1666422e-2f;
  series = series * rest + 1.6666658e-1f;
  series = series * rest + 0.5f;
  series = series * rest + 1.0f;
  series = series * rest + 1.0f;
  I16 power = (__builtin_convertvector(steps, I16) + 127) << 23;
  F16 found = series * as_float(power);
  found = value < all(-87.0f) ? zeros() : found;
  return value == value ? found : value;
}
INLINE F16 tanh(F16 value) { return 1.0f - 2.0f / (exp(2.0f * value) + 1.0f); }

// bfloat16 <-> float32
INLINE F16 widen(H16 value) { return as_float((I16)(__builtin_convertvector(value, U16) << 16)); }
INLINE F16 load_bf16(const uint16_t* from) { return widen(load<H16>(from)); }
INLINE H16 narrow(F16 value) {
#if defined(__AVX512BF16__)
  return (H16)_mm512_cvtneps_pbh((__m512)value);
#else
  U16 bits = (U16)value;
  return __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, H16);
#endif
}
INLINE void store_bf16(uint16_t* to, F16 value) { store(to, narrow(value)); }
INLINE float widen(uint16_t value) {
  uint32_t bits = (uint32_t)value << 16;
  float found;
  memcpy(&found, &bits, 4);
  return found;
}

// int8 -> float32
INLINE F16 widen(B16 value) {
#if defined(__AVX512F__)
  return to_float((I16)_mm512_cvtepi8_epi32((__m128i)value));
#elif defined(__AVX2__)
  const __m128i bytes = (__m128i)value;
  const __m256i halves[2] = {_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))};
  return to_float(load<I16>(halves));
#else
  return to_float(__builtin_convertvector(value, I16));
#endif
}

// float16 -> float32
INLINE F16 load_half(const uint16_t* from) {
#if defined(__AVX512F__)
  return (F16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#else
  U16 bits = __builtin_convertvector(load<H16>(from), U16);
  U16 sign = (bits & 0x8000) << 16, rest = bits & 0x7fff;
  F16 normal = as_float((I16)(rest << 13)) * 0x1p112f;  // also right for subnormal numbers; infinities do not occur
  return as_float((I16)((U16)normal | sign));
#endif
}

INLINE float half_to_float(uint16_t value) {
  uint32_t bits = (uint32_t)(value & 0x7fff) << 13;
  float found;
  memcpy(&found, &bits, 4);
  found *= 0x1p112f;
  return value & 0x8000 ? -found : found;
}

INLINE int32_t four_bytes(const void* from) { return load<int32_t>(from); }
INLINE float four_bytes_as_float(int32_t bytes) { return load<float>(&bytes); }

// acc[i] += a.low * b[i].low + a.high * b[i].high: `pairs` are 16 pairs of bfloat16, `pair` one pair for all of them.
INLINE F16 dot2(F16 acc, I16 pairs, int32_t pair) {
#if defined(__AVX512BF16__)
  return (F16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)(__m512i)pairs, (__m512bh)_mm512_set1_epi32(pair));
#else
  float low = widen((uint16_t)pair), high = widen((uint16_t)((uint32_t)pair >> 16));
  acc = as_float(pairs << 16) * low + acc;
  return as_float(pairs & (int32_t)0xffff0000) * high + acc;
#endif
}

#if defined(__AVX2__)
// acc[i] += bytes 0 and 2 times the two words of `even`, bytes 1 and 3 times those of `odd`, which are the same for all i.
template <class Sum>
INLINE Sum dot_words(Sum acc, I16 bytes, __m256i even, __m256i odd) {
  const __m256i low = _mm256_set1_epi32(0x00ff00ff);
  __m256i halves[2], sums[2];
  memcpy(halves, &bytes, 64);
  memcpy(sums, &acc, 64);
  UNROLL for (int i = 0; i < 2; i++) {
    sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(_mm256_and_si256(halves[i], low), even));
    sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(_mm256_srli_epi16(halves[i], 8), odd));
  }
  memcpy(&acc, sums, 64);
  return acc;
}
#endif

// acc[i] += sum over j of unsigned[i][j] * signed[j]: 16 times four bytes, and four bytes for all of them. Exact.
INLINE I16 dot4(I16 acc, I16 bytes, int32_t four) {
#if defined(__AVX512VNNI__)
  return (I16)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)bytes, _mm512_set1_epi32(four));
#else
  int8_t parts[4];
  memcpy(parts, &four, 4);
#if defined(__AVX2__)
  // two bytes become two words, of which a product pair is summed in 32 bits: `maddubs` alone would saturate
  const __m256i even = _mm256_set1_epi32((uint16_t)parts[0] | ((uint32_t)(uint16_t)parts[2] << 16));
  const __m256i odd = _mm256_set1_epi32((uint16_t)parts[1] | ((uint32_t)(uint16_t)parts[3] << 16));
  return dot_words(acc, bytes, even, odd);
#else
  acc += (bytes & 0xff) * parts[0] + ((bytes >> 8) & 0xff) * parts[1];
  return acc + ((bytes >> 16) & 0xff) * parts[2] + ((bytes >> 24) & 0xff) * parts[3];
#endif
#endif
}

// Four numbers of 16 bits (at most 127 * 256 + 127) as `dot4_words` takes them.
INLINE int64_t four_words(int32_t a, int32_t b, int32_t c, int32_t d) {
#if defined(__AVX512VNNI__)
  const int32_t words[4] = {a, b, c, d};
  int8_t halves[8];  // four high ones, then four low ones, which are signed, too
  UNROLL for (int i = 0; i < 4; i++) {
    halves[4 + i] = (int8_t)words[i];
    halves[i] = (int8_t)((words[i] - halves[4 + i]) >> 8);
  }
  return load<int64_t>(halves);
#else
  const int16_t words[4] = {(int16_t)a, (int16_t)c, (int16_t)b, (int16_t)d};
  return load<int64_t>(words);
#endif
}

// acc[i] += sum over j of unsigned[i][j] * words[j], as `dot4` with numbers of 16 bits. Exact where the sum fits 32 bits: what is
// on the way may overflow.
#if defined(__AVX512VNNI__)
struct WordSum {
  I16 high, low;
};
INLINE WordSum dot4_words(WordSum acc, I16 bytes, const int64_t* four) {
  return {dot4(acc.high, bytes, four_bytes(four)), dot4(acc.low, bytes, four_bytes((const char*)four + 4))};
}
INLINE U16 total(WordSum acc) { return ((U16)acc.high << 8) + (U16)acc.low; }
#else
typedef U16 WordSum;
INLINE WordSum dot4_words(WordSum acc, I16 bytes, const int64_t* four) {
#if defined(__AVX2__)
  const __m256i even = _mm256_set1_epi32(four_bytes(four)), odd = _mm256_set1_epi32(four_bytes((const char*)four + 4));
  return dot_words(acc, bytes, even, odd);
#else
  int16_t words[4];
  memcpy(words, four, 8);
  const U16 all_bytes = (U16)bytes;
  acc += (all_bytes & 0xff) * (uint32_t)(int32_t)words[0] + ((all_bytes >> 8) & 0xff) * (uint32_t)(int32_t)words[2];
  return acc + ((all_bytes >> 16) & 0xff) * (uint32_t)(int32_t)words[1] + (all_bytes >> 24) * (uint32_t)(int32_t)words[3];
#endif
}
INLINE U16 total(WordSum acc) { return acc; }
#endif

INLINE void prefetch(const void* at) { __builtin_prefetch(at, 0, 2); }

}  // namespace nonet
