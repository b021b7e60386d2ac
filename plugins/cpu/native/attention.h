// Paged attention over blocks of 16 tokens: written and read in the order that dot products take numbers in.
//
// Of one layer the cache is [num_blocks * block_size / 16, num_kv_heads, 2, 16 * head_dim]. Keys of 16 tokens: for each pair of
// dimensions, the pairs of all 16 tokens (float32: for each dimension, 16 numbers). Values: for each pair of tokens, all
// dimensions of both, interleaved (float32: token after token). So neither product needs sums across a register.
//
// The keys of a row are taken in chunks at multiples of 256 positions. Each chunk has its own maximum and sum, and chunks are
// joined in order (online softmax; Milakov and Gimelshein 2018, arXiv:1805.02867; split as in Flash-Decoding, Dao et al. 2023). So
// a row's result depends neither on the rows beside it nor on which thread had which chunk.
#pragma once
#include "matrix.h"

namespace nonet {

constexpr int SUB = 16;      // tokens of a block of the cache as kernels see it
constexpr int CHUNK = 256;   // positions
constexpr int MOST_ROWS = 12;  // query heads at once
constexpr float MASKED = -1e30f;

struct BfloatCache {
  typedef uint16_t Element;
  static constexpr int PACK = 2;  // numbers in four bytes
  INLINE F16 product(F16 acc, I16 numbers, int32_t unit) { return dot2(acc, numbers, unit); }
  INLINE void pack(Element* to, F16 value) { store_bf16(to, value); }
};
struct FloatCache {
  typedef float Element;
  static constexpr int PACK = 1;
  INLINE F16 product(F16 acc, I16 numbers, int32_t unit) {
    float value;
    memcpy(&value, &unit, 4);
    return as_float(numbers) * value + acc;
  }
  INLINE void pack(Element* to, F16 value) { store(to, value); }
};

struct Heads {
  int32_t num_heads, num_kv_heads, head_dim;
  float scale;
  int32_t window;  // 0: none; a token sees itself and the window - 1 positions before it
  float softcap;   // 0: none
  int ratio() const { return num_heads / num_kv_heads; }
};

// Where the tokens of one request lie.
struct Pages {
  const int32_t* table;  // [blocks]
  int64_t block_size;
  int64_t sub(int64_t position) const {
    return table[position / block_size] * (block_size / SUB) + position % block_size / SUB;
  }
};

template <class Cache>
INLINE typename Cache::Element* keys_of(void* cache, const Heads& heads, int64_t sub, int kv_head) {
  return (typename Cache::Element*)cache + (sub * heads.num_kv_heads + kv_head) * 2 * SUB * heads.head_dim;
}

// `key` and `value` [head_dim] of one token, to slot `slot` (position within all blocks).
template <class Cache>
static void write_kv(void* cache, const Heads& heads, int64_t slot, int kv_head, const float* key, const float* value) {
  typedef typename Cache::Element Element;
  const int dim = heads.head_dim, lane = slot % SUB;
  Element* keys = keys_of<Cache>(cache, heads, slot / SUB, kv_head);
  Element* values = keys + SUB * dim;
  alignas(64) Element packed[512];
  for (int i = 0; i < dim; i += 16) Cache::pack(packed + i, load<F16>(key + i));
  for (int i = 0; i < dim; i += Cache::PACK) memcpy(keys + i * SUB + lane * Cache::PACK, packed + i, 4);
  for (int i = 0; i < dim; i += 16) Cache::pack(packed + i, load<F16>(value + i));
  Element* to = values + lane / Cache::PACK * Cache::PACK * dim + lane % Cache::PACK;
  for (int i = 0; i < dim; i++) to[i * Cache::PACK] = packed[i];
}

// Up to a few tokens of one request, with the query heads of one kv head: `count * ratio` rows.
struct Tile {
  int32_t request, row, count;  // `row`: of the first token in T
  int64_t position;             // of the first token
};

// What a chunk brought, or several: `most` and `total` of each row, and values [rows, head_dim] not yet divided by the total.
struct Partial {
  float *most, *total, *values;
};

INLINE void merge_row(float* most, float* total, float* values, float other_most, float other_total, const float* other, int dim) {
  float joint = other_most > *most ? other_most : *most;
  F16 two = all(0.0f);
  two[0] = *most - joint, two[1] = other_most - joint;
  two = exp(two);
  float mine = two[0], theirs = two[1];
  for (int i = 0; i < dim; i += 16) store(values + i, load<F16>(values + i) * mine + load<F16>(other + i) * theirs);
  *total = *total * mine + other_total * theirs;
  *most = joint;
}

struct AttentionScratch {
  int32_t* queries;  // [rows, head_dim * element / 4] packed
  float* scores;     // [rows, CHUNK]
  void* weights;     // [rows, CHUNK] elements
  void* tail;        // [16, head_dim] elements: the values of a block whose end belongs to nobody yet
};

template <class Cache>
struct ChunkWork {
  typedef typename Cache::Element Element;
  const Heads& heads;
  const Pages& pages;
  const Tile& tile;
  int kv_head;
  void* cache;
  AttentionScratch scratch;
  int64_t first_key, last_key;  // of all rows, within this chunk
  int64_t start;                // of the chunk

  int units() const { return heads.head_dim / Cache::PACK; }
  int64_t last_seen(int row) const { return tile.position + row / heads.ratio(); }

  const Element* keys(int64_t sub) const { return keys_of<Cache>(cache, heads, pages.sub(sub * SUB), kv_head); }

  template <int R, int BLOCKS>
  MEMBER void score(int row, int64_t sub) const {
    const Element *from[BLOCKS], *next[BLOCKS];
    F16 acc[BLOCKS][R];
    UNROLL for (int b = 0; b < BLOCKS; b++) {
      from[b] = keys(sub + b);
      next[b] = keys(std::min(sub + b + BLOCKS, last_key / SUB));
      UNROLL for (int r = 0; r < R; r++) acc[b][r] = zeros();
    }
    const int32_t* query = scratch.queries + (int64_t)row * units();
    for (int u = 0; u < units(); u++) {
      UNROLL for (int b = 0; b < BLOCKS; b++) {
        I16 numbers = load<I16>(from[b] + u * SUB * Cache::PACK);
        prefetch(next[b] + u * SUB * Cache::PACK);                         // the keys that come next
        prefetch(from[b] + SUB * heads.head_dim + u * SUB * Cache::PACK);      // and the values of these
        UNROLL for (int r = 0; r < R; r++) acc[b][r] = Cache::product(acc[b][r], numbers, query[r * units() + u]);
      }
    }
    UNROLL for (int b = 0; b < BLOCKS; b++) {
      UNROLL for (int r = 0; r < R; r++) {
        F16 found = acc[b][r];
        if (heads.softcap != 0.0f) found = tanh(found / heads.softcap) * heads.softcap;
        found = visible(row + r, sub + b, found);
        store(scratch.scores + (int64_t)(row + r) * CHUNK + ((sub + b) * SUB - start), found);
      }
    }
  }

  MEMBER F16 visible(int row, int64_t sub, F16 scores) const {
    int64_t last = last_seen(row) - sub * SUB, first = heads.window ? last - heads.window + 1 : 0;
    if (last >= SUB - 1 && first <= 0) return scores;
    I16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    I16 hidden = lane > all_int(last < SUB ? (int32_t)last : SUB);
    if (first > 0) hidden |= lane < all_int(first < SUB ? (int32_t)first : SUB);
    return hidden ? all(MASKED) : scores;
  }

  // Weights of one row from its scores: to `scratch.weights`, with their maximum and sum.
  MEMBER void soften(int row, int64_t first_sub, int64_t last_sub, float* most, float* total) const {
    const float* scores = scratch.scores + (int64_t)row * CHUNK - start;
    Element* weights = (Element*)scratch.weights + (int64_t)row * CHUNK - start;
    F16 peak = all(MASKED), sums = zeros();
    for (int64_t sub = first_sub; sub <= last_sub; sub++) peak = max(load<F16>(scores + sub * SUB), peak);
    *most = largest(peak);
    for (int64_t sub = first_sub; sub <= last_sub; sub++) {
      F16 score = load<F16>(scores + sub * SUB);
      F16 weight = score <= all(MASKED) ? zeros() : exp(score - *most);
      sums += weight;
      Cache::pack(weights + sub * SUB, weight);
    }
    *total = sum(sums);
  }

  template <int R, int WIDTH>
  MEMBER void weigh(int row, int64_t first_sub, int64_t last_sub, int column, float* out) const {
    F16 acc[R][WIDTH];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < WIDTH; v++) acc[r][v] = zeros();
    const char* weights = (const char*)((const Element*)scratch.weights + (int64_t)row * CHUNK - start);
    for (int64_t sub = first_sub; sub <= last_sub; sub++) {
      const Element* from = values(sub) + column * Cache::PACK;
      for (int u = 0; u < SUB / Cache::PACK; u++, from += heads.head_dim * Cache::PACK) {
        I16 numbers[WIDTH];
        UNROLL for (int v = 0; v < WIDTH; v++) numbers[v] = load<I16>(from + v * 16 * Cache::PACK);
        UNROLL for (int r = 0; r < R; r++) {
          int32_t unit = four_bytes(weights + ((int64_t)r * CHUNK + sub * SUB) * sizeof(Element) + u * 4);
          UNROLL for (int v = 0; v < WIDTH; v++) acc[r][v] = Cache::product(acc[r][v], numbers[v], unit);
        }
      }
    }
    UNROLL for (int r = 0; r < R; r++) {
      UNROLL for (int v = 0; v < WIDTH; v++) store(out + (int64_t)(row + r) * heads.head_dim + column + v * 16, acc[r][v]);
    }
  }

  // What lies behind the last token may be anything, also NaN, which a weight of zero does not hide.
  const Element* values(int64_t sub) const {
    if ((sub + 1) * SUB > last_key + 1) return (const Element*)scratch.tail;
    return keys(sub) + SUB * heads.head_dim;
  }

  void make_tail() const {
    int64_t sub = last_key / SUB;
    int known = last_key % SUB + 1;
    if (known == SUB) return;
    const Element* from = keys(sub) + SUB * heads.head_dim;
    Element* to = (Element*)scratch.tail;
    const int dim = heads.head_dim;
    int whole = known / Cache::PACK * Cache::PACK;
    memcpy(to, from, (size_t)whole * dim * sizeof(Element));
    memset(to + whole * dim, 0, (size_t)(SUB - whole) * dim * sizeof(Element));
    if (whole < known) {
      for (int i = 0; i < dim; i++) to[whole * dim + i * Cache::PACK] = from[whole * dim + i * Cache::PACK];
    }
  }

  template <int R>
  MEMBER void rows(int row, int64_t first_sub, int64_t last_sub, const Partial& found) const {
    constexpr int BLOCKS = R <= 3 ? 4 : R <= 6 ? 2 : 1, WIDTH = R <= 6 ? 4 : 2;
    int64_t sub = first_sub;
    for (; sub + BLOCKS - 1 <= last_sub; sub += BLOCKS) score<R, BLOCKS>(row, sub);
    for (; sub <= last_sub; sub++) score<R, 1>(row, sub);
    for (int r = row; r < row + R; r++) soften(r, first_sub, last_sub, found.most + r, found.total + r);
    int column = 0;
    for (; column + 16 * WIDTH <= heads.head_dim; column += 16 * WIDTH) weigh<R, WIDTH>(row, first_sub, last_sub, column, found.values);
    for (; column < heads.head_dim; column += 16) weigh<R, 1>(row, first_sub, last_sub, column, found.values);
  }

  void run(const Partial& found) const {
    make_tail();
    in_blocks<MOST_ROWS>(0, tile.count * heads.ratio(), [&]<int R>(int64_t row) {
      rows<R>((int)row, first_key / SUB, last_key / SUB, found);
    });
  }
};

}  // namespace nonet
