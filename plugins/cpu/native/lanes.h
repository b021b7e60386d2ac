// Sixteen lanes at a time, on any machine: one register where it is as wide as that, else a pair, or a pair of pairs. (Vectors
// that are wider than a register are a GCC and Clang language, too, but live in memory there, and each sum with them.)
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace nonet {

#define INLINE static inline __attribute__((always_inline))
#define MEMBER inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

#if defined(__AVX512F__)
constexpr int LANES = 16;  // numbers of 32 bits in a register
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

template <class V>
struct Pair {
  V a, b;
};
template <class V>
Pair(V, V) -> Pair<V>;

template <class V>
constexpr bool IS_PAIR = false;
template <class V>
constexpr bool IS_PAIR<Pair<V>> = true;

template <class T, int N>
struct Of {
  typedef Pair<typename Of<T, N / 2>::Lanes> Lanes;
};
template <class T>
struct Of<T, LANES> {
  typedef T Lanes __attribute__((vector_size(LANES * sizeof(T))));
};

typedef Of<float, 16>::Lanes F16;
typedef Of<int32_t, 16>::Lanes I16;
typedef Of<uint32_t, 16>::Lanes U16;
typedef Of<uint16_t, 16>::Lanes H16;
typedef Of<int8_t, 16>::Lanes B16;

// As many as one register has.
typedef Of<float, LANES>::Lanes Floats;
typedef Of<int32_t, LANES>::Lanes Ints;
typedef Of<uint32_t, LANES>::Lanes Unsigneds;

#define EACH_OF_PAIR(OP)                                                                     \
  template <class V, class W>                                                                \
  INLINE auto operator OP(Pair<V> x, Pair<W> y) { return Pair{x.a OP y.a, x.b OP y.b}; }     \
  template <class V, class S>                                                                \
    requires std::is_arithmetic_v<S>                                                         \
  INLINE auto operator OP(Pair<V> x, S y) { return Pair{x.a OP y, x.b OP y}; }               \
  template <class V, class S>                                                                \
    requires std::is_arithmetic_v<S>                                                         \
  INLINE auto operator OP(S x, Pair<V> y) { return Pair{x OP y.a, x OP y.b}; }
EACH_OF_PAIR(+)
EACH_OF_PAIR(-)
EACH_OF_PAIR(*)
EACH_OF_PAIR(/)
EACH_OF_PAIR(&)
EACH_OF_PAIR(|)
EACH_OF_PAIR(<<)
EACH_OF_PAIR(>>)
EACH_OF_PAIR(<)
EACH_OF_PAIR(>)
EACH_OF_PAIR(<=)
EACH_OF_PAIR(==)
EACH_OF_PAIR(!=)
#undef EACH_OF_PAIR
template <class V>
INLINE Pair<V> operator-(Pair<V> x) { return {-x.a, -x.b}; }
template <class V>
INLINE Pair<V>& operator+=(Pair<V>& x, Pair<V> y) { return x = x + y; }
template <class V>
INLINE Pair<V>& operator|=(Pair<V>& x, Pair<V> y) { return x = x | y; }

// Also of a single number.
template <class V>
INLINE V load(const void* from) {
  if constexpr (IS_PAIR<V>) {
    return {load<decltype(V::a)>(from), load<decltype(V::b)>((const char*)from + sizeof(V::a))};
  } else {
    V value;
    memcpy(&value, from, sizeof value);
    return value;
  }
}
template <class V>
INLINE void store(void* to, V value) {
  if constexpr (IS_PAIR<V>) {
    store(to, value.a), store((char*)to + sizeof value.a, value.b);
  } else {
    memcpy(to, &value, sizeof value);
  }
}

// The same bits, or the same numbers.
template <class To, class From>
INLINE To as(From value) {
  if constexpr (IS_PAIR<To>) {
    return {as<decltype(To::a)>(value.a), as<decltype(To::b)>(value.b)};
  } else {
    return (To)value;
  }
}
template <class To, class From>
INLINE To converted(From value) {
  if constexpr (IS_PAIR<To>) {
    return {converted<decltype(To::a)>(value.a), converted<decltype(To::b)>(value.b)};
  } else {
    return __builtin_convertvector(value, To);
  }
}
template <class Mask, class V>
INLINE V select(Mask mask, V yes, V no) {
  if constexpr (IS_PAIR<V>) {
    return {select(mask.a, yes.a, no.a), select(mask.b, yes.b, no.b)};
  } else {
    return mask ? yes : no;
  }
}
template <class V>
INLINE auto lane(const V& value, int index) {
  if constexpr (IS_PAIR<V>) {
    const int half = sizeof(V) / 8;  // of numbers of 32 bits
    return index < half ? lane(value.a, index) : lane(value.b, index - half);
  } else {
    return value[index];
  }
}
template <class V>
INLINE V max(V a, V b) {
  if constexpr (IS_PAIR<V>) return {max(a.a, b.a), max(a.b, b.b)};
#if defined(__AVX2__) && !defined(__AVX512F__)
  if constexpr (std::is_same_v<V, Floats>) return (V)_mm256_max_ps((__m256)a, (__m256)b);
#endif
  if constexpr (!IS_PAIR<V>) return a > b ? a : b;
}
template <class V>
INLINE V min(V a, V b) {
  return select(a < b, a, b);
}

// Of one register, lane i ^ STEP.
template <int STEP, class V>
INLINE V swapped(V value) {
#if defined(__clang__)
#define SWAP(...) return __builtin_shufflevector(value, value, __VA_ARGS__)
#else
  typedef int32_t Index __attribute__((vector_size(sizeof(V))));
#define SWAP(...) return __builtin_shuffle(value, Index{__VA_ARGS__})
#endif
#define FOUR(i) (i) ^ STEP, ((i) + 1) ^ STEP, ((i) + 2) ^ STEP, ((i) + 3) ^ STEP
  if constexpr (sizeof(V) == 64) SWAP(FOUR(0), FOUR(4), FOUR(8), FOUR(12));
  if constexpr (sizeof(V) == 32) SWAP(FOUR(0), FOUR(4));
  if constexpr (sizeof(V) == 16) SWAP(FOUR(0));
#undef FOUR
#undef SWAP
}

// All lanes joined to one number by join(a, b).
template <class V, class Join>
INLINE auto folded(V value, Join join) {
  if constexpr (IS_PAIR<V>) {
    return folded(join(value.a, value.b), join);
  } else {
    if constexpr (sizeof(V) > 32) value = join(value, swapped<8>(value));
    if constexpr (sizeof(V) > 16) value = join(value, swapped<4>(value));
    value = join(value, swapped<2>(value));
    return join(value, swapped<1>(value))[0];
  }
}

INLINE F16 zeros() { return F16{}; }
INLINE F16 all(float value) { return F16{} + value; }
INLINE I16 all_int(int32_t value) { return I16{} + value; }
INLINE F16 as_float(I16 bits) { return as<F16>(bits); }
INLINE F16 to_float(I16 value) { return converted<F16>(value); }
INLINE I16 to_int(F16 value) { return converted<I16>(value); }

INLINE float sum(F16 value) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)value);
#else
  return folded(value, [](auto a, auto b) __attribute__((always_inline)) { return a + b; });
#endif
}
INLINE float largest(F16 value) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)value);
#else
  return folded(value, [](auto a, auto b) __attribute__((always_inline)) { return max(a, b); });
#endif
}
INLINE int32_t sum(I16 value) {
  return folded(value, [](auto a, auto b) __attribute__((always_inline)) { return a + b; });
}
INLINE bool has_nan(F16 a, F16 b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_UNORD_Q) != 0;
#else
  return folded((a != a) | (b != b), [](auto x, auto y) __attribute__((always_inline)) { return x | y; }) != 0;
#endif
}

}  // namespace nonet
