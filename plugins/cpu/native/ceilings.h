// What this machine can at most, with the same team and the same instructions: bytes read, and operations in registers.
#pragma once
#include <algorithm>
#include <chrono>

#include "matrix.h"
#include "threads.h"

namespace nonet {

constexpr int64_t READ_BYTES = 512 << 20;  // past every cache
constexpr int ROUNDS = 8;                  // the best counts: what else the machine does only ever adds
constexpr int PRODUCTS = 1 << 20;          // of each accumulator

template <class Work>
static double best_seconds(Team& team, Work work) {
  double best = 1e30;
  for (int round = 0; round < ROUNDS; round++) {
    auto started = std::chrono::steady_clock::now();
    team.run(work);
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count());
  }
  return best;
}

static double bytes_per_second(Team& team, const uint8_t* data) {
  std::atomic<int32_t> kept{0};  // or nothing would be read
  double seconds = best_seconds(team, [&](int thread) {
    const int64_t share = READ_BYTES / team.size() / 256 * 256;
    const uint8_t* from = data + thread * share;
    I16 sums[4] = {};
    for (int64_t at = 0; at < share; at += 256) {
      UNROLL for (int i = 0; i < 4; i++) {
        prefetch(from + at + 4096 + i * 64);
        sums[i] += load<I16>(from + at + i * 64);
      }
    }
    kept += sum(sums[0] + sums[1] + sums[2] + sums[3]);
  });
  return (double)(READ_BYTES / team.size() / 256 * 256) * team.size() / seconds;
}

// Multiplications and additions of the instructions that multiply rows of this format.
static double operations_per_second(Team& team, int format) {
  constexpr int CHAINS = 12;
  std::atomic<int32_t> kept{0};
  double seconds = best_seconds(team, [&](int thread) {
    F16 floats[CHAINS] = {};
    I16 ints[CHAINS] = {};
    I16 numbers = all_int(0x01010101 + thread);
    for (int n = 0; n < PRODUCTS; n++) {
      UNROLL for (int c = 0; c < CHAINS; c++) {
        if (format == FLOAT32) floats[c] = as_float(numbers) * 0.5f + floats[c];
        if (format == BFLOAT16) floats[c] = dot2(floats[c], numbers, 0x3f803f80);
        if (format >= INT8) ints[c] = dot4(ints[c], numbers, 0x01010101);
      }
      asm volatile("" : "+m"(numbers));  // may be others in each round
    }
    F16 all_floats = zeros();
    I16 all_ints = {};
    UNROLL for (int c = 0; c < CHAINS; c++) all_floats += floats[c], all_ints += ints[c];
    kept += (int32_t)sum(all_floats) + sum(all_ints);
  });
  const int products = format == FLOAT32 ? 16 : format == BFLOAT16 ? 32 : 64;
  return 2.0 * products * CHAINS * PRODUCTS * team.size() / seconds;
}

}  // namespace nonet
