// What numbers become on the way, and products that sum neighbours: these have no spelling in the language of `lanes.h`, so there is
// a branch for each instruction set, and a plain loop.
#pragma once
#include <cmath>

#include "lanes.h"

namespace nonet {

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
  I16 power = (to_int(steps) + 127) << 23;
  F16 found = series * as_float(power);
  found = select(value < all(-87.0f), zeros(), found);
  return select(value == value, found, value);
}
INLINE F16 tanh(F16 value) { return 1.0f - 2.0f / (exp(2.0f * value) + 1.0f); }

// bfloat16 <-> float32
INLINE F16 widen(H16 value) { return as<F16>(converted<U16>(value) << 16); }
INLINE F16 load_bf16(const uint16_t* from) { return widen(load<H16>(from)); }
INLINE H16 narrow(F16 value) {
#if defined(__AVX512BF16__)
  return (H16)_mm512_cvtneps_pbh((__m512)value);
#else
  U16 bits = as<U16>(value);
  return converted<H16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
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
#else
  return to_float(converted<I16>(value));
#endif
}

// float16 -> float32. Also right for subnormal numbers; infinities do not occur.
template <class V>
INLINE V load_half(const uint16_t* from) {
  if constexpr (IS_PAIR<V>) {
    return {load_half<decltype(V::a)>(from), load_half<decltype(V::b)>(from + sizeof(V::a) / 4)};
  } else {
#if defined(__AVX512F__)
    return (V)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__)
    return (V)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
    Unsigneds bits = __builtin_convertvector(load<Of<uint16_t, LANES>::Lanes>(from), Unsigneds);
    V normal = (V)((bits & 0x7fff) << 13) * 0x1p112f;
    return (V)((Unsigneds)normal | (bits & 0x8000) << 16);
#endif
  }
}

INLINE float half_to_float(uint16_t value) {
  uint32_t bits = (uint32_t)(value & 0x7fff) << 13;
  float found;
  memcpy(&found, &bits, 4);
  found *= 0x1p112f;
  return value & 0x8000 ? -found : found;
}

INLINE int32_t four_bytes(const void* from) { return load<int32_t>(from); }

// --- a register of numbers, times the same few for all of its lanes ---------------------------------------------------------------

// What bfloat16 is multiplied with: bfloat16, where there are instructions for it.
#if defined(__AVX512BF16__)
typedef uint16_t Factor;
INLINE void store_factors(Factor* to, F16 value) { store_bf16(to, value); }
#else
typedef float Factor;
INLINE void store_factors(Factor* to, F16 value) { store(to, value); }
#endif

INLINE Floats low_halves(Ints pairs) { return (Floats)(pairs << 16); }
INLINE Floats high_halves(Ints pairs) { return (Floats)(pairs & (int32_t)0xffff0000); }

// acc[i] += pairs[i].low * two[0] + pairs[i].high * two[1]. `pairs`: two of bfloat16 in each lane.
INLINE Floats dot2(Floats acc, Ints pairs, const Factor* two) {
#if defined(__AVX512BF16__)
  return (F16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)(__m512i)pairs, (__m512bh)_mm512_set1_epi32(four_bytes(two)));
#else
  acc = low_halves(pairs) * two[0] + acc;
  return high_halves(pairs) * two[1] + acc;
#endif
}

// What bytes are multiplied with: bytes, where there are instructions for it, else words, in fours of an order of their own.
#if defined(__AVX512VNNI__)
typedef int8_t Digit;
INLINE void store_digits(Digit*, I16) {}
#else
typedef int16_t Digit;
INLINE void store_digits(Digit* to, I16 value) {
  alignas(64) int32_t numbers[16];
  store(numbers, value);
  UNROLL for (int i = 0; i < 16; i++) to[i] = (int16_t)numbers[(i & 12) | (i & 1) << 1 | (i & 2) >> 1];  // 0 2 1 3
}
#endif

// Summed up now: a compiler that adds up many products at their end has no registers for them.
INLINE Ints summed(Ints sum) {
#if defined(__AVX512F__)
  asm("" : "+v"(sum));
#elif defined(__x86_64__)
  asm("" : "+x"(sum));
#endif
  return sum;
}
INLINE Ints plus(Ints sum, Ints products) { return summed((Ints)((Unsigneds)sum + (Unsigneds)products)); }

// Sums of neighbours: words times words, and bytes times signed bytes, in lanes of 16 bits (the sum of two has to fit).
INLINE Ints two_words(Ints x, Ints y) {
#if defined(__AVX512BW__)
  return (Ints)_mm512_madd_epi16((__m512i)x, (__m512i)y);
#elif defined(__AVX2__)
  return (Ints)_mm256_madd_epi16((__m256i)x, (__m256i)y);
#elif defined(__SSE2__)
  return (Ints)_mm_madd_epi16((__m128i)x, (__m128i)y);
#else
  return (x << 16 >> 16) * (y << 16 >> 16) + (x >> 16) * (y >> 16);
#endif
}

#if !defined(__AVX512VNNI__)
INLINE Ints even_bytes(Ints bytes) { return bytes & 0x00ff00ff; }
INLINE Ints odd_bytes(Ints bytes) {
  typedef uint16_t Words __attribute__((vector_size(sizeof(Ints))));
  return (Ints)((Words)bytes >> 8);
}
#endif

// acc[i] += sum over j of unsigned[i][j] * digits[j]: four bytes in each lane. Exact where the sum fits 32 bits: what is on the way may
// overflow.
INLINE Ints dot4(Ints acc, Ints bytes, const Digit* four) {
#if defined(__AVX512VNNI__)
  return (I16)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)bytes, _mm512_set1_epi32(four_bytes(four)));
#else
  acc = plus(acc, two_words(even_bytes(bytes), Ints{} + four_bytes(four)));
  return plus(acc, two_words(odd_bytes(bytes), Ints{} + four_bytes(four + 2)));
#endif
}

// Four numbers of 16 bits (at most 127 * 256 + 127) as `dot4` takes them: one Digit is not enough where it is a byte.
#if defined(__AVX512VNNI__)
INLINE int64_t four_words(int32_t a, int32_t b, int32_t c, int32_t d) {
  const int32_t words[4] = {a, b, c, d};
  int8_t halves[8];  // four high ones, then four low ones, which are signed, too
  UNROLL for (int i = 0; i < 4; i++) {
    halves[4 + i] = (int8_t)words[i];
    halves[i] = (int8_t)((words[i] - halves[4 + i]) >> 8);
  }
  return load<int64_t>(halves);
}
struct WordSum {
  I16 high, low;
};
INLINE WordSum dot4_words(WordSum acc, I16 bytes, const int64_t* four) {
  const Digit* halves = (const Digit*)four;
  return {dot4(acc.high, bytes, halves), dot4(acc.low, bytes, halves + 4)};
}
INLINE U16 total(WordSum acc) { return ((U16)acc.high << 8) + (U16)acc.low; }
#else
INLINE int64_t four_words(int32_t a, int32_t b, int32_t c, int32_t d) {
  const int16_t words[4] = {(int16_t)a, (int16_t)c, (int16_t)b, (int16_t)d};
  return load<int64_t>(words);
}
typedef I16 WordSum;
template <class V>
INLINE V dot4_words(V acc, V bytes, const int64_t* four) {
  if constexpr (IS_PAIR<V>) {
    return {dot4_words(acc.a, bytes.a, four), dot4_words(acc.b, bytes.b, four)};
  } else {
    return dot4(acc, bytes, (const Digit*)four);
  }
}
INLINE U16 total(WordSum acc) { return as<U16>(acc); }
#endif

// As `dot4` for bytes below 16 and eight times in a row at most: sums of neighbours then fit 16 bits, and wait to be joined.
#if defined(__AVX512VNNI__) || !(defined(__AVX2__) || defined(__AVX512BW__))
typedef Digit SmallDigit;
INLINE Ints dot4_small(Ints acc, Ints bytes, const SmallDigit* four) { return dot4(acc, bytes, four); }
INLINE Ints joined(Ints acc) { return acc; }
#else
typedef int8_t SmallDigit;
INLINE Ints dot4_small(Ints acc, Ints bytes, const SmallDigit* four) {
#if defined(__AVX512BW__)
  return summed((Ints)_mm512_add_epi16((__m512i)acc, _mm512_maddubs_epi16((__m512i)bytes, _mm512_set1_epi32(four_bytes(four)))));
#else
  return summed((Ints)_mm256_add_epi16((__m256i)acc, _mm256_maddubs_epi16((__m256i)bytes, _mm256_set1_epi32(four_bytes(four)))));
#endif
}
INLINE Ints joined(Ints acc) { return two_words(acc, Ints{} + 0x00010001); }
#endif

INLINE void prefetch(const void* at) { __builtin_prefetch(at, 0, 2); }

}  // namespace nonet
