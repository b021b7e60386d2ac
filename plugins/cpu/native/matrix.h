// Weights as the kernels read them, rows of activations as a weight reads them, and the products of the two.
//
// A matrix [n, k] is cut into tiles of 32 of its n outputs; within a tile, numbers lie in the order in which they are used. Both
// axes are padded with zeros: n to 32, k to 32. Every output is summed in one order, whatever other rows are computed with it.
#pragma once
#include "simd.h"

#include <algorithm>

namespace nonet {

enum Format : int32_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, INT4 = 3, INT8_GROUPS = 4 };

constexpr int TILE = 32;   // outputs
constexpr int GROUP = 32;  // activations that share a scale, and weights of INT4 and INT8_GROUPS

// A group of a tile of INT4: 32 scales and 32 least values as float16, then 32 x 32 numbers of four bits (the low halves of 64 bytes
// are four k of 16 outputs, the high halves the next four k). weight = scale * number + least.
constexpr int INT4_GROUP_BYTES = 128 + TILE * GROUP / 2;
// Of INT8_GROUPS: 32 scales as float16, then the numbers as INT8 has them.
constexpr int INT8_GROUP_BYTES = 64 + TILE * GROUP;

INLINE int padded(int size) { return (size + 31) / 32 * 32; }

INLINE int64_t tile_bytes(int32_t format, int k) {
  int64_t size = padded(k);
  switch (format) {
    case FLOAT32: return size * TILE * 4;
    case BFLOAT16: return size * TILE * 2;
    case INT8: return size * TILE;
    case INT4: return size / GROUP * INT4_GROUP_BYTES;
    default: return size / GROUP * INT8_GROUP_BYTES;
  }
}

struct Matrix {
  int32_t format, n, k, num_tiles;
  const uint8_t* data;  // [num_tiles, tile_bytes]
  const float* scales;  // INT8: of each output [num_tiles * 32]
  const float* bias;    // of each output, or null
  const uint8_t* tile(int index) const { return data + index * tile_bytes(format, k); }
};

// Activations [rows, padded(k)] in the format that a matrix takes: float32, factors of bfloat16, or int8 with a scale for each group.
struct Rows {
  int32_t stride;  // padded(k)
  float* floats;
  Factor* factors;
  int8_t* bytes;
  int16_t* words;  // the same numbers, where `Digit` is that
  float* scales;   // [rows, stride / GROUP]
  int32_t* sums;   // likewise: -128 times that of the int8 numbers
  float* totals;   // likewise: what they stand for, summed up
  template <class Kind>  // Digit or SmallDigit
  const Kind* digits() const {
    return sizeof(Kind) == 1 ? (const Kind*)bytes : (const Kind*)words;
  }
};

INLINE void quantize_group(const Rows& rows, int64_t at, const float* from) {
  F16 a = load<F16>(from), b = load<F16>(from + 16);
  float most = largest(max(max(a, -a), max(b, -b)));
  float inverse = most > 0.0f ? 127.0f / most : 0.0f;
  I16 first = to_int(rounded(a * inverse)), second = to_int(rounded(b * inverse));
  store(rows.bytes + at, converted<B16>(first));
  store(rows.bytes + at + 16, converted<B16>(second));
  if constexpr (sizeof(Digit) > 1) store_digits((Digit*)rows.words + at, first), store_digits((Digit*)rows.words + at + 16, second);
  const float scale = has_nan(a, b) ? NAN : most / 127.0f;  // NaN stays NaN, which a maximum may lose
  const int32_t total = sum(first + second);
  rows.scales[at / GROUP] = scale;
  rows.sums[at / GROUP] = -128 * total;
  rows.totals[at / GROUP] = scale * (float)total;
}

// `count` numbers (a multiple of 32) become columns [column, column + count) of a row.
INLINE void put(const Rows& rows, int format, int64_t row, int column, const float* from, int count) {
  int64_t at = row * rows.stride + column;
  if (format == FLOAT32) {
    memcpy(rows.floats + at, from, count * 4);
  } else if (format == BFLOAT16) {
    for (int i = 0; i < count; i += 16) store_factors(rows.factors + at + i, load<F16>(from + i));
  } else {
    for (int i = 0; i < count; i += GROUP) quantize_group(rows, at + i, from + i);
  }
}

// --- M rows times one tile ------------------------------------------------------------------------------------------------------
// out[m * stride + 0..31], or a part of that. Each pass reads its weights once, from front to back.

constexpr int PARTS = TILE / LANES;  // registers of a row's outputs

// Registers of a row's outputs that integers take at once: with many rows, which share what becomes of a weight, not all.
template <int M>
constexpr int INT_PARTS = LANES == 16 || M <= 2 ? PARTS : 2;

// product(m, p) of M rows and P parts. Loads of weights are few, or those of activations: what is used last stays in a register.
template <int M, int P, class Product>
INLINE void each_product(Product product) {
  if constexpr (P > 2) {
    UNROLL for (int p = 0; p < P; p++) UNROLL for (int m = 0; m < M; m++) product(m, p);
  } else {
    UNROLL for (int m = 0; m < M; m++) UNROLL for (int p = 0; p < P; p++) product(m, p);
  }
}
#define KERNEL static __attribute__((noinline))  // or what surrounds it takes registers from it
#define EACH_PRODUCT(...) each_product<M, P>([&](int m, int p) __attribute__((always_inline)) { __VA_ARGS__; })

// One of several over a tile: where it begins in the tile's outputs, and what to fetch meanwhile. A single one fetches a little ahead
// of itself, and behind the end the start of what is next; several share the next tile among them, group by group.
struct Pass {
  const uint8_t* next;
  int number, count;
  int part;  // the first

  template <int BYTES>  // of a group
  MEMBER void fetch(const uint8_t* tile, int group, int groups) const {
    constexpr int DISTANCE = (2048 + BYTES - 1) / BYTES;
    const uint8_t* at;
    if (count == 1) {
      at = group + DISTANCE < groups ? tile + (group + DISTANCE) * BYTES : next + std::min(group + DISTANCE - groups, groups - 1) * BYTES;
    } else {
      if (group % count != number) return;
      at = next + group * BYTES;
    }
    UNROLL for (int i = 0; i < BYTES; i += 64) prefetch(at + i);
  }
};

// Of M rows: in registers, or in memory where integers need all those.
template <int M>
struct Totals {
  static constexpr int P = INT_PARTS<M>;
  static constexpr bool IN_REGISTERS = LANES == 16 || M == 1;
  float* out;
  int64_t stride;
  Floats kept[M][P];
  MEMBER Totals(float* out, int64_t stride) : out(out), stride(stride) { EACH_PRODUCT(set(m, p, Floats{})); }
  MEMBER Floats get(int m, int p) const { return IN_REGISTERS ? kept[m][p] : load<Floats>(out + m * stride + p * LANES); }
  MEMBER void set(int m, int p, Floats value) {
    if (IN_REGISTERS) {
      kept[m][p] = value;
    } else {
      store(out + m * stride + p * LANES, value);
    }
  }
  MEMBER void finish() const {
    if (IN_REGISTERS) EACH_PRODUCT(store(out + m * stride + p * LANES, kept[m][p]));
  }
};

// `from` [M, k] at intervals of `row_stride`. BYTES: what 32 k of the tile to be fetched take.
template <int M, int BYTES>
KERNEL void tile_float32(const float* from, int64_t row_stride, const float* tile, int k, float* out, int64_t stride, const Pass& pass) {
  constexpr int P = PARTS;
  Floats sums[M][P] = {};
  for (int group = 0; group < k / GROUP; group++) {
    const float* weights = tile + group * GROUP * TILE;
    pass.fetch<BYTES>((const uint8_t*)tile, group, k / GROUP);
    for (int i = 0; i < GROUP; i++, weights += TILE, from++) {
      EACH_PRODUCT(sums[m][p] = load<Floats>(weights + p * LANES) * from[m * row_stride] + sums[m][p]);
    }
  }
  EACH_PRODUCT(store(out + m * stride + p * LANES, sums[m][p]));
}

template <int M>
KERNEL void tile_bfloat16(const Rows& rows, int64_t row, const uint8_t* tile, int k, float* out, int64_t stride, const Pass& pass) {
  const Factor* from = rows.factors + row * rows.stride;
  constexpr int P = PARTS;
  Floats sums[M][P] = {};
  for (int group = 0; group < k / GROUP; group++, from += GROUP) {
    const uint8_t* weights = tile + group * GROUP * TILE * 2;
    pass.fetch<GROUP * TILE * 2>(tile, group, k / GROUP);
    for (int i = 0; i < GROUP; i += 2, weights += 128) {
      auto pairs = [&](int p) __attribute__((always_inline)) { return load<Ints>(weights + p * sizeof(Ints)); };
      auto two = [&](int m) __attribute__((always_inline)) { return from + i + (int64_t)m * rows.stride; };
      if constexpr (sizeof(Factor) == 2) {
        EACH_PRODUCT(sums[m][p] = dot2(sums[m][p], pairs(p), two(m)));
      } else {  // one after the other, or there are too few registers
        EACH_PRODUCT(sums[m][p] = low_halves(pairs(p)) * (float)two(m)[0] + sums[m][p]);
        EACH_PRODUCT(sums[m][p] = high_halves(pairs(p)) * (float)two(m)[1] + sums[m][p]);
      }
    }
  }
  EACH_PRODUCT(store(out + m * stride + p * LANES, sums[m][p]));
}

// sums += M rows times a group of 32 x 32 bytes.
template <int M>
INLINE void add_group(int64_t stride, const Digit* from, const uint8_t* bytes, Ints (&sums)[M][INT_PARTS<M>]) {
  constexpr int P = INT_PARTS<M>;
  for (int i = 0; i < GROUP; i += 4, bytes += 128, from += 4) {
    auto four = [&](int p) __attribute__((always_inline)) { return load<Ints>(bytes + p * sizeof(Ints)); };
#if defined(__AVX512VNNI__)
    EACH_PRODUCT(sums[m][p] = dot4(sums[m][p], four(p), from + m * stride));
#else
    EACH_PRODUCT(sums[m][p] = plus(sums[m][p], two_words(even_bytes(four(p)), Ints{} + four_bytes(from + m * stride))));
    EACH_PRODUCT(sums[m][p] = plus(sums[m][p], two_words(odd_bytes(four(p)), Ints{} + four_bytes(from + m * stride + 2))));
#endif
  }
}
// The same with bytes below 16, from nothing.
template <int M>
INLINE void add_small_group(int64_t stride, const SmallDigit* from, const uint8_t* bytes, Ints (&sums)[M][INT_PARTS<M>]) {
  constexpr int P = INT_PARTS<M>;
  EACH_PRODUCT(sums[m][p] = Ints{});
  for (int i = 0; i < GROUP; i += 4, bytes += 128, from += 4) {
    EACH_PRODUCT(sums[m][p] = dot4_small(sums[m][p], load<Ints>(bytes + p * sizeof(Ints)), from + m * stride));
  }
  EACH_PRODUCT(sums[m][p] = joined(sums[m][p]));
}

// Weights are bytes above 128: (w + 128) * a, less 128 times the sum of a.
template <int M>
KERNEL void tile_int8(
    const Rows& rows, int64_t row, const uint8_t* tile, int k, const float* weight_scales, float* out, int64_t stride, const Pass& pass) {
  const uint8_t* weights = tile + pass.part * sizeof(Ints);
  const int groups = rows.stride / GROUP;
  const Digit* from = rows.digits<Digit>() + row * rows.stride;
  const float* scales = rows.scales + row * groups;
  const int32_t* sums = rows.sums + row * groups;
  constexpr int P = INT_PARTS<M>;
  Totals<M> totals(out, stride);
  for (int group = 0; group < k / GROUP; group++, from += GROUP) {
    pass.fetch<GROUP * TILE>(tile, group, k / GROUP);
    Ints found[M][P];
    EACH_PRODUCT(found[m][p] = Ints{} + sums[m * groups + group]);
    add_group<M>(rows.stride, from, weights, found);
    weights += TILE * GROUP;
    EACH_PRODUCT(totals.set(m, p, converted<Floats>(found[m][p]) * scales[m * groups + group] + totals.get(m, p)));
  }
  EACH_PRODUCT(totals.set(m, p, totals.get(m, p) * load<Floats>(weight_scales + (pass.part + p) * LANES)));
  totals.finish();
}

template <int M>
KERNEL void tile_int8_groups(const Rows& rows, int64_t row, const uint8_t* tile, int k, float* out, int64_t stride, const Pass& pass) {
  const uint8_t* weights = tile;
  const int groups = rows.stride / GROUP;
  const Digit* from = rows.digits<Digit>() + row * rows.stride;
  const float* scales = rows.scales + row * groups;
  const int32_t* sums = rows.sums + row * groups;
  constexpr int P = INT_PARTS<M>;
  Totals<M> totals(out, stride);
  for (int group = 0; group < k / GROUP; group++, from += GROUP) {
    pass.fetch<INT8_GROUP_BYTES>(tile, group, k / GROUP);
    const uint16_t* weight_scales = (const uint16_t*)weights + pass.part * LANES;
    Ints found[M][P];
    EACH_PRODUCT(found[m][p] = Ints{} + sums[m * groups + group]);
    add_group<M>(rows.stride, from, weights + 64 + pass.part * sizeof(Ints), found);
    weights += INT8_GROUP_BYTES;
    EACH_PRODUCT({
      const Floats scale = load_half<Floats>(weight_scales + p * LANES) * scales[m * groups + group];
      totals.set(m, p, converted<Floats>(found[m][p]) * scale + totals.get(m, p));
    });
  }
  totals.finish();
}

template <int M>
KERNEL void tile_int4(const Rows& rows, int64_t row, const uint8_t* tile, int k, float* out, int64_t stride, const Pass& pass) {
  const uint8_t* weights = tile;
  const int groups = rows.stride / GROUP;
  const SmallDigit* from = rows.digits<SmallDigit>() + row * rows.stride;
  const float* scales = rows.scales + row * groups;
  const float* group_totals = rows.totals + row * groups;
  constexpr int P = INT_PARTS<M>;
  Totals<M> totals(out, stride);
  for (int group = 0; group < k / GROUP; group++, from += GROUP, weights += INT4_GROUP_BYTES) {
    pass.fetch<INT4_GROUP_BYTES>(tile, group, k / GROUP);
    const uint16_t* factors = (const uint16_t*)weights + pass.part * LANES;
    const uint8_t* numbers = weights + 128 + pass.part * sizeof(Ints);
    Ints found[M][P];
    EACH_PRODUCT(found[m][p] = Ints{});
    UNROLL for (int j = 0; j < 4; j++) {
      auto eight = [&](int p) __attribute__((always_inline)) { return load<Unsigneds>(numbers + j * 128 + p * sizeof(Ints)); };
      auto low = [&](int p) __attribute__((always_inline)) { return (Ints)(eight(p) & 0x0f0f0f0fu); };
      auto high = [&](int p) __attribute__((always_inline)) { return (Ints)((eight(p) >> 4) & 0x0f0f0f0fu); };
      auto at = [&](int m) __attribute__((always_inline)) { return from + (int64_t)m * rows.stride + j * 8; };
      if constexpr (LANES == 16) {
        EACH_PRODUCT(found[m][p] = dot4_small(dot4_small(found[m][p], low(p), at(m)), high(p), at(m) + 4));
      } else {
        EACH_PRODUCT(found[m][p] = dot4_small(found[m][p], low(p), at(m)));
        EACH_PRODUCT(found[m][p] = dot4_small(found[m][p], high(p), at(m) + 4));
      }
    }
    EACH_PRODUCT({
      const float scale = scales[m * groups + group], total = group_totals[m * groups + group];
      const Floats rest = load_half<Floats>(factors + TILE + p * LANES) * total + totals.get(m, p);
      totals.set(m, p, converted<Floats>(joined(found[m][p])) * (load_half<Floats>(factors + p * LANES) * scale) + rest);
    });
  }
  totals.finish();
}

// The same with numbers that `unpack_int4` has made bytes of: worth it where many rows share a tile. Same order, same result.
template <int M>
KERNEL void tile_int4_unpacked(
    const Rows& rows, int64_t row, const uint8_t* bytes, const float* factors, int k, float* out, int64_t stride, const Pass& pass) {
  const int groups = rows.stride / GROUP;
  const SmallDigit* from = rows.digits<SmallDigit>() + row * rows.stride;
  const float* scales = rows.scales + row * groups;
  const float* group_totals = rows.totals + row * groups;
  constexpr int P = INT_PARTS<M>;
  Totals<M> totals(out, stride);
  bytes += pass.part * sizeof(Ints), factors += pass.part * LANES;
  for (int group = 0; group < k / GROUP; group++, from += GROUP, factors += 64) {
    pass.fetch<INT4_GROUP_BYTES>(nullptr, group, k / GROUP);
    Ints found[M][P];
    add_small_group<M>(rows.stride, from, bytes, found);
    bytes += TILE * GROUP;
    EACH_PRODUCT({
      const float scale = scales[m * groups + group], total = group_totals[m * groups + group];
      const Floats rest = load<Floats>(factors + TILE + p * LANES) * total + totals.get(m, p);
      totals.set(m, p, converted<Floats>(found[m][p]) * (load<Floats>(factors + p * LANES) * scale) + rest);
    });
  }
  totals.finish();
}

// The numbers of a tile of BFLOAT16, which `tile_float32` takes then: same order, same result, where factors are float32.
static void unpack_bfloat16(const uint8_t* tile, int k, float* numbers) {
  for (int i = 0; i < k; i += 2, tile += TILE * 4, numbers += 2 * TILE) {
    UNROLL for (int p = 0; p < PARTS; p++) {
      const Ints pairs = load<Ints>(tile + p * sizeof(Ints));
      store(numbers + p * LANES, low_halves(pairs));
      store(numbers + TILE + p * LANES, high_halves(pairs));
    }
  }
}

static void unpack_int4(const uint8_t* tile, int k, uint8_t* bytes, float* factors) {
  for (int group = 0; group < k / GROUP; group++, tile += INT4_GROUP_BYTES, bytes += TILE * GROUP, factors += 64) {
    for (int i = 0; i < 64; i += 16) store(factors + i, load_half<F16>((const uint16_t*)tile + i));
    for (int j = 0; j < 4; j++) {
      for (int half = 0; half < 2; half++) {
        U16 packed = load<U16>(tile + 128 + j * 128 + half * 64);
        store(bytes + j * 256 + half * 64, packed & 0x0f0f0f0fu);
        store(bytes + j * 256 + 128 + half * 64, (packed >> 4) & 0x0f0f0f0fu);
      }
    }
  }
}

// --- one output's weights -------------------------------------------------------------------------------------------------------

// out[0..k) of output n, as numbers.
static void unpacked_row(const Matrix& matrix, int64_t n, float* out) {
  const uint8_t* tile = matrix.data + n / TILE * tile_bytes(matrix.format, matrix.k);
  const int column = n % TILE;
  for (int i = 0; i < matrix.k; i++) {
    switch (matrix.format) {
      case FLOAT32: out[i] = ((const float*)tile)[i * TILE + column]; break;
      case BFLOAT16: out[i] = widen(((const uint16_t*)tile)[(i / 2 * TILE + column) * 2 + i % 2]); break;
      case INT8: out[i] = ((int)tile[(i / 4 * TILE + column) * 4 + i % 4] - 128) * matrix.scales[n]; break;
      case INT8_GROUPS: {
        const uint8_t* group = tile + i / GROUP * INT8_GROUP_BYTES;
        const int j = i % GROUP;
        out[i] = ((int)group[64 + (j / 4 * TILE + column) * 4 + j % 4] - 128) * half_to_float(((const uint16_t*)group)[column]);
        break;
      }
      default: {
        const uint8_t* group = tile + i / GROUP * INT4_GROUP_BYTES;
        const uint16_t* factors = (const uint16_t*)group;
        const int j = i % GROUP, number = group[128 + (j / 8 * TILE + column) * 4 + j % 4] >> (j % 8 < 4 ? 0 : 4) & 15;
        out[i] = half_to_float(factors[column]) * number + half_to_float(factors[TILE + column]);
      }
    }
  }
}

// --- any number of rows ---------------------------------------------------------------------------------------------------------

constexpr bool MANY_REGISTERS = LANES == 16;  // 32, not 16
constexpr int MOST_FLOAT_ROWS = MANY_REGISTERS ? 12 : LANES == 8 ? 3 : 1, MOST_INT_ROWS = 6, MOST_UNPACKED_ROWS = 5, MOST_INT4_ROWS = 4;
constexpr int MOST_BFLOAT_ROWS = MANY_REGISTERS ? 12 : LANES == 8 ? 2 : 1;
constexpr int UNPACK_ROWS = 16;  // from so many rows on a tile is unpacked, where that costs less than it saves
constexpr bool UNPACKS_INT4 = MANY_REGISTERS, UNPACKS_BFLOAT16 = !MANY_REGISTERS;

struct Scratch {  // of a tile that is unpacked
  uint8_t* bytes;  // [padded(k) * 32]
  float* factors;  // [padded(k) / 32 * 64], or [padded(k) * 32] of BFLOAT16
};

// Calls kernel<M>(row) for `count` rows from `row` on, as many at once as `MOST` allows.
template <int MOST, class Kernel>
INLINE void in_blocks(int64_t row, int count, Kernel kernel) {
  for (; count >= MOST; row += MOST, count -= MOST) kernel.template operator()<MOST>(row);
  if constexpr (MOST > 1) {
    if (count) in_blocks<(MOST > 6 ? 6 : MOST - 1)>(row, count, kernel);
  }
}

template <int MOST, class Kernel>
INLINE void with_rows(int count, Kernel kernel) {
  if (count == MOST) return kernel.template operator()<MOST>();
  if constexpr (MOST > 1) with_rows<MOST - 1>(count, kernel);
}

// The same in blocks of equal size, with all passes over the tile: kernel<M>(row, pass). A small last block would be bound by loads.
template <int MOST, bool INTS, class Kernel>
INLINE void in_passes(int64_t row, int count, const uint8_t* next, Kernel kernel) {
  auto each_block = [&](auto work) __attribute__((always_inline)) {
    int64_t first = row;
    for (int left = (count + MOST - 1) / MOST, rest = count, size; left > 0; left--, first += size, rest -= size) {
      size = (rest + left - 1) / left;
      with_rows<MOST>(size, [&]<int M>() { work.template operator()<M, INTS ? INT_PARTS<M> : PARTS>(first); });
    }
  };
  int number = 0, passes = 0;
  each_block([&]<int M, int P>(int64_t) { passes += PARTS / P; });
  each_block([&]<int M, int P>(int64_t first) {
    for (int part = 0; part < PARTS; part += P) kernel.template operator()<M>(first, Pass{next, number++, passes, part});
  });
}

// out[(r - row) * stride + 0..31] of rows [row, row + count) and one tile, bias included. `next`: the tile behind this one.
static void product(
    const Matrix& matrix, const Rows& rows, int64_t row, int count, int tile, float* out, int64_t stride, const Scratch& scratch,
    const uint8_t* next) {
  const int k = padded(matrix.k);
  const uint8_t* data = matrix.tile(tile);
  const float* scales = matrix.scales + (matrix.format == INT8 ? tile * TILE : 0);
  auto at = [&](int64_t r, const Pass& pass) { return out + (r - row) * stride + pass.part * LANES; };
  switch (matrix.format) {
    case FLOAT32:
      in_passes<MOST_FLOAT_ROWS, false>(row, count, next, [&]<int M>(int64_t r, const Pass& pass) {
        const float* from = rows.floats + r * rows.stride;
        tile_float32<M, GROUP * TILE * 4>(from, rows.stride, (const float*)data, k, at(r, pass), stride, pass);
      });
      break;
    case BFLOAT16:
      if (UNPACKS_BFLOAT16 && count >= UNPACK_ROWS) {
        unpack_bfloat16(data, k, scratch.factors);
        in_passes<MOST_FLOAT_ROWS, false>(row, count, next, [&]<int M>(int64_t r, const Pass& pass) {
          const float* from = (const float*)rows.factors + r * rows.stride;
          tile_float32<M, GROUP * TILE * 2>(from, rows.stride, scratch.factors, k, at(r, pass), stride, pass);
        });
        break;
      }
      in_passes<MOST_BFLOAT_ROWS, false>(row, count, next, [&]<int M>(int64_t r, const Pass& pass) {
        tile_bfloat16<M>(rows, r, data, k, at(r, pass), stride, pass);
      });
      break;
    case INT8:
      in_passes<MOST_INT_ROWS, true>(row, count, next, [&]<int M>(int64_t r, const Pass& pass) {
        tile_int8<M>(rows, r, data, k, scales, at(r, pass), stride, pass);
      });
      break;
    case INT8_GROUPS:
      in_passes<MOST_INT_ROWS, true>(row, count, next, [&]<int M>(int64_t r, const Pass& pass) {
        tile_int8_groups<M>(rows, r, data, k, at(r, pass), stride, pass);
      });
      break;
    default:
      if (!UNPACKS_INT4 || count < UNPACK_ROWS) {
        in_passes<MOST_INT4_ROWS, true>(row, count, next, [&]<int M>(int64_t r, const Pass& pass) {
          tile_int4<M>(rows, r, data, k, at(r, pass), stride, pass);
        });
        break;
      }
      unpack_int4(data, k, scratch.bytes, scratch.factors);
      in_passes<MOST_UNPACKED_ROWS, true>(row, count, next, [&]<int M>(int64_t r, const Pass& pass) {
        tile_int4_unpacked<M>(rows, r, scratch.bytes, scratch.factors, k, at(r, pass), stride, pass);
      });
  }
  if (matrix.bias == nullptr) return;
  F16 low = load<F16>(matrix.bias + tile * TILE), high = load<F16>(matrix.bias + tile * TILE + 16);
  for (int r = 0; r < count; r++, out += stride) {
    store(out, load<F16>(out) + low);
    store(out + 16, load<F16>(out + 16) + high);
  }
}

}  // namespace nonet
