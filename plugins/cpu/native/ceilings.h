// What this machine can at most, with the same team and the same instructions: bytes read, and operations in registers.
#pragma once
#include <algorithm>

#include "matrix.h"
#include "threads.h"

namespace nonet {

constexpr int64_t READ_BYTES = 512 << 20;  // past every cache
constexpr int ATTEMPTS = 8;                  // the best counts: what else the machine does only ever adds
constexpr int PRODUCTS = 1 << 21;          // of each accumulator, all threads together

template <class Prepare, class Work>
static double best_seconds(Team& team, Prepare prepare, Work work) {
  double best = 1e30;
  for (int round = 0; round < ATTEMPTS; round++) {
    prepare();
    double started = seconds_now();
    team.run(work);
    best = std::min(best, seconds_now() - started);
  }
  return best;
}

static double bytes_per_second(Team& team, const uint8_t* data) {
  constexpr int PIECES = 256;
  constexpr int64_t PIECE = READ_BYTES / PIECES;
  std::atomic<int32_t> kept{0};  // or nothing would be read
  std::atomic<int> next{0};
  double seconds = best_seconds(team, [&] { next = 0; }, [&](int) {
    I16 sums[4] = {};
    for (int piece; (piece = next.fetch_add(1)) < PIECES;) {
      const uint8_t* from = data + piece * PIECE;
      for (int64_t at = 0; at < PIECE; at += 256) {
        UNROLL for (int i = 0; i < 4; i++) {
          prefetch(from + at + 4096 + i * 64);
          sums[i] += load<I16>(from + at + i * 64);
        }
      }
    }
    kept += sum(sums[0] + sums[1] + sums[2] + sums[3]);
  });
  return (double)READ_BYTES / seconds;
}

// Multiplications and additions, `each` to a lane, of product(sum, numbers), in as many chains as registers keep.
template <class V, class Product>
static double products_per_second(Team& team, int each, Product product) {
  constexpr int CHAINS = 12, PIECES = 64;
  std::atomic<int32_t> kept{0};
  std::atomic<int> next{0};
  double seconds = best_seconds(team, [&] { next = 0; }, [&](int thread) {
    V sums[CHAINS];
    UNROLL for (int c = 0; c < CHAINS; c++) sums[c] = converted<V>(Ints{} + c);  // or the compiler would make one of them
    Ints numbers = Ints{} + (0x01010101 + thread);
    while (next.fetch_add(1) < PIECES) {
      for (int n = 0; n < PRODUCTS / PIECES; n++) {
        UNROLL for (int c = 0; c < CHAINS; c++) sums[c] = product(sums[c], numbers);
        asm volatile("" : "+m"(numbers));  // may be others in each round
      }
    }
    Ints total = {};
    UNROLL for (int c = 0; c < CHAINS; c++) total += (Ints)sums[c];
    for (int i = 0; i < LANES; i++) kept += total[i];
  });
  return 2.0 * each * LANES * CHAINS * PRODUCTS / seconds;
}

// Something else in each product, as far as the compiler knows.
template <class T>
INLINE const T* unknown(const T* at) {
  asm volatile("" : "+r"(at));
  return at;
}

constexpr Factor HALF = sizeof(Factor) == 2 ? (Factor)0x3f00 : (Factor)0.5f;

// Of the instructions that multiply with weights of this format.
static double operations_per_second(Team& team, int format) {
  alignas(8) static const Factor factors[2] = {HALF, HALF};
  alignas(8) static const Digit digits[4] = {1, 1, 1, 1};
  alignas(8) static const SmallDigit small_digits[4] = {1, 1, 1, 1};
  switch (format) {
    case FLOAT32: return products_per_second<Floats>(team, 1, [&](Floats sum, Ints numbers) { return (Floats)numbers * 0.5f + sum; });
    case BFLOAT16: return products_per_second<Floats>(team, 2, [&](Floats sum, Ints numbers) { return dot2(sum, numbers, factors); });
    case INT4: return products_per_second<Ints>(team, 4, [&](Ints sum, Ints numbers) { return dot4_small(sum, numbers, unknown(small_digits)); });
    default: return products_per_second<Ints>(team, 4, [&](Ints sum, Ints numbers) { return dot4(sum, numbers, unknown(digits)); });
  }
}

}  // namespace nonet
