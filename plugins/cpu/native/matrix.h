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

// Activations [rows, padded(k)] in the format that a matrix takes: float32, bfloat16, or int8 with a scale for each group.
struct Rows {
  int32_t stride;  // padded(k)
  float* floats;
  uint16_t* halves;
  int8_t* bytes;
  float* scales;  // [rows, stride / GROUP]
  int32_t* sums;  // likewise: -128 times that of the int8 numbers
};

INLINE void quantize_group(const float* from, int8_t* to, float* scale, int32_t* total) {
  F16 a = load<F16>(from), b = load<F16>(from + 16);
  float most = largest(max(max(a, -a), max(b, -b)));
  float inverse = most > 0.0f ? 127.0f / most : 0.0f;
  I16 first = __builtin_convertvector(rounded(a * inverse), I16), second = __builtin_convertvector(rounded(b * inverse), I16);
  store(to, __builtin_convertvector(first, B16));
  store(to + 16, __builtin_convertvector(second, B16));
  *scale = has_nan(a, b) ? NAN : most / 127.0f;  // NaN stays NaN, which a maximum may lose
  *total = -128 * sum(first + second);
}

// `count` numbers (a multiple of 32) become columns [column, column + count) of a row.
INLINE void put(const Rows& rows, int format, int64_t row, int column, const float* from, int count) {
  int64_t at = row * rows.stride + column;
  if (format == FLOAT32) {
    memcpy(rows.floats + at, from, count * 4);
  } else if (format == BFLOAT16) {
    for (int i = 0; i < count; i += 16) store_bf16(rows.halves + at + i, load<F16>(from + i));
  } else {
    for (int i = 0; i < count; i += GROUP) {
      int64_t group = (at + i) / GROUP;
      quantize_group(from + i, rows.bytes + at + i, rows.scales + group, rows.sums + group);
    }
  }
}

// --- M rows times one tile ------------------------------------------------------------------------------------------------------
// out[m * stride + 0..31]. Each reads its weights once, from front to back.

#define EACH_ROW UNROLL for (int m = 0; m < M; m++)

// What to fetch meanwhile. One block of rows fetches a little ahead of itself, and behind the end the start of what is next; several
// share the next tile among them, group by group.
struct Fetching {
  const uint8_t* next;
  int block, blocks;  // of rows on this tile

  template <int BYTES>  // of a group
  MEMBER void fetch(const uint8_t* tile, int group, int groups) const {
    constexpr int DISTANCE = (2048 + BYTES - 1) / BYTES;
    const uint8_t* at;
    if (blocks == 1) {
      at = group + DISTANCE < groups ? tile + (group + DISTANCE) * BYTES : next + std::min(group + DISTANCE - groups, groups - 1) * BYTES;
    } else {
      if (group % blocks != block) return;
      at = next + group * BYTES;
    }
    UNROLL for (int i = 0; i < BYTES; i += 64) prefetch(at + i);
  }
};

template <int M>
static void tile_float32(const Rows& rows, int64_t row, const uint8_t* tile, int k, float* out, int64_t stride, const Fetching& fetching) {
  const float* weights = (const float*)tile;
  const float* from = rows.floats + row * rows.stride;
  F16 low[M], high[M];
  EACH_ROW low[m] = high[m] = zeros();
  for (int i = 0; i < k; i++, weights += TILE) {
    if (i % GROUP == 0) fetching.fetch<GROUP * TILE * 4>(tile, i / GROUP, k / GROUP);
    F16 a = load<F16>(weights), b = load<F16>(weights + 16);
    EACH_ROW {
      float x = from[(int64_t)m * rows.stride + i];
      low[m] = a * x + low[m];
      high[m] = b * x + high[m];
    }
  }
  EACH_ROW store(out + m * stride, low[m]), store(out + m * stride + 16, high[m]);
}

template <int M>
static void tile_bfloat16(const Rows& rows, int64_t row, const uint8_t* tile, int k, float* out, int64_t stride, const Fetching& fetching) {
  const uint16_t* from = rows.halves + row * rows.stride;
  F16 low[M], high[M];
  EACH_ROW low[m] = high[m] = zeros();
  for (int group = 0; group < k / GROUP; group++, from += GROUP) {
    const uint8_t* weights = tile + group * GROUP * TILE * 2;
    fetching.fetch<GROUP * TILE * 2>(tile, group, k / GROUP);
    for (int i = 0; i < GROUP; i += 2, weights += 128) {
      I16 a = load<I16>(weights), b = load<I16>(weights + 64);
      EACH_ROW {
        int32_t pair = four_bytes(from + (int64_t)m * rows.stride + i);
        low[m] = dot2(low[m], a, pair);
        high[m] = dot2(high[m], b, pair);
      }
    }
  }
  EACH_ROW store(out + m * stride, low[m]), store(out + m * stride + 16, high[m]);
}

// a and b [M] += rows times a group of 32 x 32 bytes, of which a has the first 16 outputs.
template <int M>
INLINE void add_group(int64_t stride, const int8_t* from, const uint8_t* bytes, I16 (&a)[M], I16 (&b)[M]) {
  for (int i = 0; i < GROUP; i += 4, bytes += 128) {
    I16 first = load<I16>(bytes), second = load<I16>(bytes + 64);
    EACH_ROW {
      int32_t four = four_bytes(from + m * stride + i);
      a[m] = dot4(a[m], first, four);
      b[m] = dot4(b[m], second, four);
    }
  }
}

// Weights are bytes above 128: (w + 128) * a, less 128 times the sum of a.
template <int M>
static void tile_int8(
    const Rows& rows, int64_t row, const uint8_t* tile, int k, const float* weight_scales, float* out, int64_t stride,
    const Fetching& fetching) {
  const uint8_t* weights = tile;
  const int groups = rows.stride / GROUP;
  const int8_t* from = rows.bytes + row * rows.stride;
  const float* scales = rows.scales + row * groups;
  const int32_t* sums = rows.sums + row * groups;
  F16 low[M], high[M];
  EACH_ROW low[m] = high[m] = zeros();
  for (int group = 0; group < k / GROUP; group++, from += GROUP) {
    fetching.fetch<GROUP * TILE>(weights, group, k / GROUP);
    I16 a[M], b[M];
    EACH_ROW a[m] = b[m] = all_int(sums[m * groups + group]);
    add_group<M>(rows.stride, from, tile, a, b);
    tile += TILE * GROUP;
    EACH_ROW {
      float scale = scales[m * groups + group];
      low[m] = to_float(a[m]) * scale + low[m];
      high[m] = to_float(b[m]) * scale + high[m];
    }
  }
  F16 first = load<F16>(weight_scales), second = load<F16>(weight_scales + 16);
  EACH_ROW store(out + m * stride, low[m] * first), store(out + m * stride + 16, high[m] * second);
}

template <int M>
static void tile_int8_groups(const Rows& rows, int64_t row, const uint8_t* tile, int k, float* out, int64_t stride, const Fetching& fetching) {
  const uint8_t* weights = tile;
  const int groups = rows.stride / GROUP;
  const int8_t* from = rows.bytes + row * rows.stride;
  const float* scales = rows.scales + row * groups;
  const int32_t* sums = rows.sums + row * groups;
  F16 low[M], high[M];
  EACH_ROW low[m] = high[m] = zeros();
  for (int group = 0; group < k / GROUP; group++, from += GROUP) {
    fetching.fetch<INT8_GROUP_BYTES>(weights, group, k / GROUP);
    F16 scale_a = load_half((const uint16_t*)tile), scale_b = load_half((const uint16_t*)tile + 16);
    I16 a[M], b[M];
    EACH_ROW a[m] = b[m] = all_int(sums[m * groups + group]);
    tile += 64;
    add_group<M>(rows.stride, from, tile, a, b);
    tile += TILE * GROUP;
    EACH_ROW {
      float scale = scales[m * groups + group];
      low[m] = to_float(a[m]) * (scale_a * scale) + low[m];
      high[m] = to_float(b[m]) * (scale_b * scale) + high[m];
    }
  }
  EACH_ROW store(out + m * stride, low[m]), store(out + m * stride + 16, high[m]);
}

template <int M>
static void tile_int4(const Rows& rows, int64_t row, const uint8_t* tile, int k, float* out, int64_t stride, const Fetching& fetching) {
  const uint8_t* weights = tile;
  const int groups = rows.stride / GROUP;
  const int8_t* from = rows.bytes + row * rows.stride;
  const float* scales = rows.scales + row * groups;
  const int32_t* sums = rows.sums + row * groups;
  F16 low[M], high[M];
  EACH_ROW low[m] = high[m] = zeros();
  for (int group = 0; group < k / GROUP; group++, from += GROUP, tile += INT4_GROUP_BYTES) {
    fetching.fetch<INT4_GROUP_BYTES>(weights, group, k / GROUP);
    I16 a[M], b[M];
    EACH_ROW a[m] = b[m] = I16{};
    UNROLL for (int j = 0; j < 4; j++) {
      I16 first = load<I16>(tile + 128 + j * 128), second = load<I16>(tile + 192 + j * 128);
      I16 a0 = first & 0x0f0f0f0f, b0 = second & 0x0f0f0f0f;
      I16 a1 = (I16)(((U16)first >> 4) & 0x0f0f0f0fu), b1 = (I16)(((U16)second >> 4) & 0x0f0f0f0fu);
      EACH_ROW {
        const int8_t* at = from + (int64_t)m * rows.stride + j * 8;
        int32_t four = four_bytes(at), next = four_bytes(at + 4);
        a[m] = dot4(dot4(a[m], a0, four), a1, next);
        b[m] = dot4(dot4(b[m], b0, four), b1, next);
      }
    }
    F16 scale_a = load_half((const uint16_t*)tile), scale_b = load_half((const uint16_t*)tile + 16);
    F16 least_a = load_half((const uint16_t*)tile + 32), least_b = load_half((const uint16_t*)tile + 48);
    EACH_ROW {
      float scale = scales[m * groups + group], total = scale * ((float)sums[m * groups + group] * (-1.0f / 128.0f));
      low[m] = to_float(a[m]) * (scale_a * scale) + (least_a * total + low[m]);
      high[m] = to_float(b[m]) * (scale_b * scale) + (least_b * total + high[m]);
    }
  }
  EACH_ROW store(out + m * stride, low[m]), store(out + m * stride + 16, high[m]);
}

// The same with numbers that `unpack_int4` has made bytes of: worth it where many rows share a tile. Same order, same result.
template <int M>
static void tile_int4_unpacked(
    const Rows& rows, int64_t row, const uint8_t* bytes, const float* factors, int k, float* out, int64_t stride, const Fetching& fetching) {
  const int groups = rows.stride / GROUP;
  const int8_t* from = rows.bytes + row * rows.stride;
  const float* scales = rows.scales + row * groups;
  const int32_t* sums = rows.sums + row * groups;
  F16 low[M], high[M];
  EACH_ROW low[m] = high[m] = zeros();
  for (int group = 0; group < k / GROUP; group++, from += GROUP, factors += 64) {
    fetching.fetch<INT4_GROUP_BYTES>(nullptr, group, k / GROUP);
    I16 a[M], b[M];
    EACH_ROW a[m] = b[m] = I16{};
    add_group<M>(rows.stride, from, bytes, a, b);
    bytes += TILE * GROUP;
    F16 scale_a = load<F16>(factors), scale_b = load<F16>(factors + 16);
    F16 least_a = load<F16>(factors + 32), least_b = load<F16>(factors + 48);
    EACH_ROW {
      float scale = scales[m * groups + group], total = scale * ((float)sums[m * groups + group] * (-1.0f / 128.0f));
      low[m] = to_float(a[m]) * (scale_a * scale) + (least_a * total + low[m]);
      high[m] = to_float(b[m]) * (scale_b * scale) + (least_b * total + high[m]);
    }
  }
  EACH_ROW store(out + m * stride, low[m]), store(out + m * stride + 16, high[m]);
}

static void unpack_int4(const uint8_t* tile, int k, uint8_t* bytes, float* factors) {
  for (int group = 0; group < k / GROUP; group++, tile += INT4_GROUP_BYTES, bytes += TILE * GROUP, factors += 64) {
    for (int i = 0; i < 64; i += 16) store(factors + i, load_half((const uint16_t*)tile + i));
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

#if defined(__AVX512F__)
constexpr int MOST_FLOAT_ROWS = 12, MOST_INT_ROWS = 6, MOST_UNPACKED_ROWS = 5, MOST_INT4_ROWS = 4;  // as registers allow: 32 of 16 lanes
#else
constexpr int MOST_FLOAT_ROWS = 2, MOST_INT_ROWS = 1, MOST_UNPACKED_ROWS = 1, MOST_INT4_ROWS = 1;  // 16 of 8 lanes
#endif
constexpr int UNPACK_ROWS = 16;  // from so many rows on a tile of INT4 is unpacked

struct Scratch {
  uint8_t* bytes;  // [padded(k) * 32], of a tile that is unpacked
  float* factors;  // [padded(k) / 32 * 64]
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

// The same in blocks of equal size, with what each has to fetch: kernel<M>(row, fetching). A small last one would be bound by loads.
template <int MOST, class Kernel>
INLINE void in_blocks_fetching(int64_t row, int count, const uint8_t* next, Kernel kernel) {
  Fetching fetching{next, 0, (count + MOST - 1) / MOST};
  for (int size; count > 0; row += size, count -= size, fetching.block++) {
    const int left = fetching.blocks - fetching.block;
    size = (count + left - 1) / left;
    with_rows<MOST>(size, [&]<int M>() { kernel.template operator()<M>(row, fetching); });
  }
}

// out[(r - row) * stride + 0..31] of rows [row, row + count) and one tile, bias included. `next`: the tile behind this one.
static void product(
    const Matrix& matrix, const Rows& rows, int64_t row, int count, int tile, float* out, int64_t stride, const Scratch& scratch,
    const uint8_t* next) {
  const int k = padded(matrix.k);
  const uint8_t* data = matrix.tile(tile);
  const float* scales = matrix.scales + (matrix.format == INT8 ? tile * TILE : 0);
  auto at = [&](int64_t r) { return out + (r - row) * stride; };
  switch (matrix.format) {
    case FLOAT32:
      in_blocks_fetching<MOST_FLOAT_ROWS>(row, count, next, [&]<int M>(int64_t r, const Fetching& fetching) {
        tile_float32<M>(rows, r, data, k, at(r), stride, fetching);
      });
      break;
    case BFLOAT16:
      in_blocks_fetching<MOST_FLOAT_ROWS>(row, count, next, [&]<int M>(int64_t r, const Fetching& fetching) {
        tile_bfloat16<M>(rows, r, data, k, at(r), stride, fetching);
      });
      break;
    case INT8:
      in_blocks_fetching<MOST_INT_ROWS>(row, count, next, [&]<int M>(int64_t r, const Fetching& fetching) {
        tile_int8<M>(rows, r, data, k, scales, at(r), stride, fetching);
      });
      break;
    case INT8_GROUPS:
      in_blocks_fetching<MOST_INT_ROWS>(row, count, next, [&]<int M>(int64_t r, const Fetching& fetching) {
        tile_int8_groups<M>(rows, r, data, k, at(r), stride, fetching);
      });
      break;
    default:
      if (count < UNPACK_ROWS) {
        in_blocks_fetching<MOST_INT4_ROWS>(row, count, next, [&]<int M>(int64_t r, const Fetching& fetching) {
          tile_int4<M>(rows, r, data, k, at(r), stride, fetching);
        });
        break;
      }
      unpack_int4(data, k, scratch.bytes, scratch.factors);
      in_blocks_fetching<MOST_UNPACKED_ROWS>(row, count, next, [&]<int M>(int64_t r, const Fetching& fetching) {
        tile_int4_unpacked<M>(rows, r, scratch.bytes, scratch.factors, k, at(r), stride, fetching);
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
