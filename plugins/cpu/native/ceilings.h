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

// Multiplications and additions of the instructions that multiply rows of this format.
static double operations_per_second(Team& team, int format) {
  constexpr int CHAINS = 12, PIECES = 64;
  std::atomic<int32_t> kept{0};
  std::atomic<int> next{0};
  double seconds = best_seconds(team, [&] { next = 0; }, [&](int thread) {
    F16 floats[CHAINS];
    I16 ints[CHAINS];
    UNROLL for (int c = 0; c < CHAINS; c++) floats[c] = all((float)c), ints[c] = all_int(c);  // or the compiler would make one of them
    I16 numbers = all_int(0x01010101 + thread);
    while (next.fetch_add(1) < PIECES) {
      for (int n = 0; n < PRODUCTS / PIECES; n++) {
        UNROLL for (int c = 0; c < CHAINS; c++) {
          if (format == FLOAT32) floats[c] = as_float(numbers) * 0.5f + floats[c];
          if (format == BFLOAT16) floats[c] = dot2(floats[c], numbers, 0x3f803f80);
          if (format >= INT8) ints[c] = dot4(ints[c], numbers, 0x01010101);
        }
        asm volatile("" : "+m"(numbers));  // may be others in each round
      }
    }
    F16 all_floats = zeros();
    I16 all_ints = {};
    UNROLL for (int c = 0; c < CHAINS; c++) all_floats += floats[c], all_ints += ints[c];
    kept += (int32_t)sum(all_floats) + sum(all_ints);
  });
  const int products = format == FLOAT32 ? 16 : format == BFLOAT16 ? 32 : 64;
  return 2.0 * products * CHAINS * PRODUCTS / seconds;
}

}  // namespace nonet
