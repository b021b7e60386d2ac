// Paged attention over blocks of 16 tokens: written and read in the order that dot products take numbers in.
//
// Of one layer the cache is [num_blocks * block_size / 16, num_kv_heads, 2, 16 * head_dim]. Keys of 16 tokens: for each pair of
// dimensions, the pairs of all 16 tokens (float32: for each dimension, 16 numbers). Values: for each pair of tokens, all
// dimensions of both, interleaved (float32: token after token). So neither product needs sums across a register.
//
// In int8 it is [num_blocks * block_size / 16, num_kv_heads, 128 + 2 * 16 * head_dim] bytes: float32 scales of the 16 keys, then of
// the 16 values; the keys, each four dimensions of all tokens, as bytes above 128; the values, token after token. Keys are
// multiplied, exactly, with queries of 16 bits of a row's largest number; values with weights in float32.
//
// The keys of a row are taken in chunks at multiples of 256 positions. Each chunk has its own maximum and sum, and chunks are
// joined in order (online softmax; Milakov and Gimelshein 2018, arXiv:1805.02867; split as in Flash-Decoding, Dao et al. 2023). So
// a row's result depends neither on the rows beside it nor on which thread had which chunk.
#pragma once
#include "matrix.h"

namespace nonet {

constexpr int SUB = 16;      // tokens of a block of the cache as kernels see it
constexpr int CHUNK = 256;   // positions
constexpr int MOST_ROWS = 12;  // query heads that share keys
constexpr int ROWS_TOGETHER = LANES == 16 ? MOST_ROWS : 4;  // in registers
constexpr float MASKED = -1e30f;

// Of a cache whose numbers stand for themselves. `PACK` numbers of a key lie side by side in four bytes, `TOKENS` of a value.
struct PlainCache {
  typedef F16 Sum;
  typedef I16 Values;  // 16 dimensions of TOKENS tokens
  static constexpr bool SCALED = false;
  static constexpr int HEAD_BYTES = 0;  // before the keys of 16 tokens
  static constexpr int EXTRA = 0;       // entries behind a row's query
  INLINE Values values(const void* from) { return load<I16>(from); }
  INLINE F16 scores(Sum sum, const void*, const float*) { return sum; }
};
struct BfloatCache : PlainCache {
  typedef uint16_t Element;
  typedef Factor Weight;
  struct Query {  // what a row has for the numbers that lie side by side
    Factor two[2];
  };
  static constexpr int PACK = 2, TOKENS = 2;
  template <class S, class V>
  INLINE S product(S acc, V numbers, const Factor* two) {
    if constexpr (IS_PAIR<S>) {
      return {product(acc.a, numbers.a, two), product(acc.b, numbers.b, two)};
    } else {
      return dot2(acc, numbers, two);
    }
  }
  INLINE F16 product(F16 acc, I16 numbers, const Query& query) { return product(acc, numbers, query.two); }
  INLINE void pack(Element* to, F16 value) { store_bf16(to, value); }
  INLINE void pack_factors(Factor* to, F16 value) { store_factors(to, value); }
};
struct FloatCache : PlainCache {
  typedef float Element;
  typedef float Weight;
  typedef float Query;
  static constexpr int PACK = 1, TOKENS = 1;
  INLINE F16 product(F16 acc, I16 numbers, float factor) { return as_float(numbers) * factor + acc; }
  INLINE F16 product(F16 acc, I16 numbers, const float* factor) { return product(acc, numbers, *factor); }
  INLINE void pack(Element* to, F16 value) { store(to, value); }
  INLINE void pack_factors(float* to, F16 value) { store(to, value); }
};

// Integers up to `limit` and what they are multiples of; that is NaN, and they are 0, where a number is infinite or none.
struct Rounding {
  float inverse, scale;
  bool finite;
  Rounding(const float* from, int count, float factor, float limit) {
    F16 most = zeros(), check = zeros();
    for (int i = 0; i < count; i += 16) {
      F16 value = load<F16>(from + i) * factor;
      most = max(max(value, -value), most);
      check = value * 0.0f + check;
    }
    float peak = largest(most);
    finite = sum(check) == 0.0f;
    inverse = finite && peak > 1e-30f ? limit / peak : 0.0f;
    scale = finite ? peak / limit : NAN;
  }
  MEMBER I16 of(F16 value) const { return finite ? to_int(rounded(value * inverse)) : I16{}; }
};

struct Int8Cache {
  typedef uint8_t Element;
  typedef float Weight;
  typedef int64_t Query;
  typedef WordSum Sum;
  typedef F16 Values;
  static constexpr bool SCALED = true;
  static constexpr int PACK = 4, TOKENS = 1, HEAD_BYTES = 2 * SUB * 4, EXTRA = 1;
  static constexpr float MOST_QUERY = 127 * 256 + 127;  // two signed bytes; its products with bytes fit 32 bits up to 512 dimensions

  INLINE Sum product(Sum acc, I16 numbers, const Query& unit) { return dot4_words(acc, numbers, &unit); }
  INLINE F16 product(F16 acc, F16 numbers, const float* factor) { return numbers * *factor + acc; }
  INLINE Values values(const void* from) { return widen(load<B16>(from)); }

  // `extra`: of the row, its scale and what the 128 that each byte of a key is too large sum up to.
  INLINE F16 scores(Sum sum, const Query* extra, const float* key_scales) {
    float scale = load<float>(extra);
    I16 found = as<I16>(total(sum) - (uint32_t)four_bytes((const char*)extra + 4));
    return to_float(found) * (load<F16>(key_scales) * scale);
  }

  static float pack_numbers(Element* to, const float* from, int count, int above) {
    Rounding rounding(from, count, 1.0f, 127.0f);
    for (int i = 0; i < count; i += 16) store(to + i, converted<B16>(rounding.of(load<F16>(from + i)) + above));
    return rounding.scale;
  }

  static void pack_query(Query* to, const float* from, int dim, float factor) {
    Rounding rounding(from, dim, factor, MOST_QUERY);
    int32_t total = 0;
    for (int i = 0; i < dim; i += 16) {
      I16 rounded = rounding.of(load<F16>(from + i) * factor);
      total += sum(rounded);
      alignas(64) int32_t numbers[16];
      store(numbers, rounded);
      UNROLL for (int j = 0; j < 16; j += 4) *to++ = four_words(numbers[j], numbers[j + 1], numbers[j + 2], numbers[j + 3]);
    }
    total *= 128;
    memcpy(to, &rounding.scale, 4);
    memcpy((char*)to + 4, &total, 4);
  }
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
  const int64_t bytes = Cache::HEAD_BYTES + 2 * SUB * heads.head_dim * sizeof(typename Cache::Element);
  return (typename Cache::Element*)((char*)cache + (sub * heads.num_kv_heads + kv_head) * bytes + Cache::HEAD_BYTES);
}

// Of the keys [16] and then of the values [16] of a block.
template <class Cache>
INLINE float* scales_of(const typename Cache::Element* keys) {
  return (float*)((char*)keys - Cache::HEAD_BYTES);
}

// `dim` numbers of one token; returns their scale.
template <class Cache>
INLINE float pack_numbers(typename Cache::Element* to, const float* from, int dim, int above) {
  if constexpr (Cache::SCALED) {
    return Cache::pack_numbers(to, from, dim, above);
  } else {
    for (int i = 0; i < dim; i += 16) Cache::pack(to + i, load<F16>(from + i));
    return 1.0f;
  }
}

// One row times `factor`: `dim / PACK + EXTRA` entries.
template <class Cache>
INLINE void pack_query(typename Cache::Query* to, const float* from, int dim, float factor) {
  if constexpr (Cache::SCALED) {
    Cache::pack_query(to, from, dim, factor);
  } else {
    for (int i = 0; i < dim; i += 16) Cache::pack_factors((typename Cache::Weight*)to + i, load<F16>(from + i) * factor);
  }
}

// `key` and `value` [head_dim] of one token, to slot `slot` (position within all blocks).
template <class Cache>
static void write_kv(void* cache, const Heads& heads, int64_t slot, int kv_head, const float* key, const float* value) {
  typedef typename Cache::Element Element;
  const int dim = heads.head_dim, lane = slot % SUB;
  Element* keys = keys_of<Cache>(cache, heads, slot / SUB, kv_head);
  Element* values = keys + SUB * dim;
  alignas(64) Element packed[512];
  float key_scale = pack_numbers<Cache>(packed, key, dim, 128);
  for (int i = 0; i < dim; i += Cache::PACK) memcpy(keys + i * SUB + lane * Cache::PACK, packed + i, 4);
  float value_scale = pack_numbers<Cache>(packed, value, dim, 0);
  Element* to = values + lane / Cache::TOKENS * Cache::TOKENS * dim + lane % Cache::TOKENS;
  for (int i = 0; i < dim; i++) to[i * Cache::TOKENS] = packed[i];
  if constexpr (Cache::SCALED) scales_of<Cache>(keys)[lane] = key_scale, scales_of<Cache>(keys)[SUB + lane] = value_scale;
}

// Up to a few tokens of one request, with the query heads of one kv head: `count * ratio` rows.
struct Span {
  int32_t request, row, count;  // `row`: of the first token in T
  int64_t position;             // of the first token
};

// What a chunk brought, or several: `most` and `total` of each row, and values [rows, head_dim] not yet divided by the total.
struct Partial {
  float *most, *total, *values;
};

INLINE void merge_row(float* most, float* total, float* values, float other_most, float other_total, const float* other, int dim) {
  float joint = other_most > *most ? other_most : *most;
  alignas(64) float two[16] = {*most - joint, other_most - joint};
  F16 factors = exp(load<F16>(two));
  float mine = lane(factors, 0), theirs = lane(factors, 1);
  for (int i = 0; i < dim; i += 16) store(values + i, load<F16>(values + i) * mine + load<F16>(other + i) * theirs);
  *total = *total * mine + other_total * theirs;
  *most = joint;
}

struct AttentionScratch {
  void* queries;   // [rows, head_dim / PACK + EXTRA] packed
  float* scores;   // [rows, CHUNK]
  void* weights;   // [rows, CHUNK]
  void* tail;      // [16, head_dim] elements: the values of a block whose end belongs to nobody yet
  float* scales;   // [CHUNK] of values
};

template <class Cache>
struct ChunkWork {
  typedef typename Cache::Element Element;
  typedef typename Cache::Weight Weight;
  typedef typename Cache::Query Query;
  typedef typename Cache::Sum Sum;
  const Heads& heads;
  const Pages& pages;
  const Span& span;
  int kv_head;
  void* cache;
  AttentionScratch scratch;
  int64_t first_key, last_key;  // of all rows, within this chunk
  int64_t start;                // of the chunk

  int units() const { return heads.head_dim / Cache::PACK; }
  int64_t last_seen(int row) const { return span.position + row / heads.ratio(); }

  const Element* keys(int64_t sub) const { return keys_of<Cache>(cache, heads, pages.sub(sub * SUB), kv_head); }

  template <int R, int BLOCKS>
  MEMBER void score(int row, int64_t sub) const {
    const Element *from[BLOCKS], *next[BLOCKS];
    Sum acc[BLOCKS][R];
    UNROLL for (int b = 0; b < BLOCKS; b++) {
      from[b] = keys(sub + b);
      next[b] = keys(std::min(sub + b + BLOCKS, last_key / SUB));
      if constexpr (Cache::SCALED) prefetch(scales_of<Cache>(next[b])), prefetch(scales_of<Cache>(next[b]) + SUB);
      UNROLL for (int r = 0; r < R; r++) acc[b][r] = Sum{};
    }
    const int stride = units() + Cache::EXTRA;
    const Query* query = (const Query*)scratch.queries + (int64_t)row * stride;
    for (int u = 0; u < units(); u++) {
      UNROLL for (int b = 0; b < BLOCKS; b++) {
        I16 numbers = load<I16>(from[b] + u * SUB * Cache::PACK);
        prefetch(next[b] + u * SUB * Cache::PACK);                         // the keys that come next
        prefetch(from[b] + SUB * heads.head_dim + u * SUB * Cache::PACK);      // and the values of these
        UNROLL for (int r = 0; r < R; r++) acc[b][r] = Cache::product(acc[b][r], numbers, query[r * stride + u]);
      }
    }
    UNROLL for (int b = 0; b < BLOCKS; b++) {
      const float* scales = scales_of<Cache>(from[b]);
      if constexpr (Cache::SCALED) store(scratch.scales + ((sub + b) * SUB - start), load<F16>(scales + SUB));
      UNROLL for (int r = 0; r < R; r++) {
        F16 found = Cache::scores(acc[b][r], query + r * stride + units(), scales);
        if (heads.softcap != 0.0f) found = tanh(found / heads.softcap) * heads.softcap;
        found = visible(row + r, sub + b, found);
        store(scratch.scores + (int64_t)(row + r) * CHUNK + ((sub + b) * SUB - start), found);
      }
    }
  }

  MEMBER F16 visible(int row, int64_t sub, F16 scores) const {
    int64_t last = last_seen(row) - sub * SUB, first = heads.window ? last - heads.window + 1 : 0;
    if (last >= SUB - 1 && first <= 0) return scores;
    alignas(64) static const int32_t OFFSETS[SUB] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    I16 offset = load<I16>(OFFSETS), hidden = offset > all_int(last < SUB ? (int32_t)last : SUB);
    if (first > 0) hidden |= offset < all_int(first < SUB ? (int32_t)first : SUB);
    return select(hidden, all(MASKED), scores);
  }

  // Weights of one row from its scores: to `scratch.weights`, with their maximum and sum. The scales of values go into them.
  MEMBER void soften(int row, int64_t first_sub, int64_t last_sub, float* most, float* total) const {
    const float* scores = scratch.scores + (int64_t)row * CHUNK - start;
    Weight* weights = (Weight*)scratch.weights + (int64_t)row * CHUNK - start;
    F16 peak = all(MASKED), sums = zeros();
    for (int64_t sub = first_sub; sub <= last_sub; sub++) peak = max(load<F16>(scores + sub * SUB), peak);
    *most = largest(peak);
    for (int64_t sub = first_sub; sub <= last_sub; sub++) {
      F16 score = load<F16>(scores + sub * SUB);
      F16 weight = select(score <= all(MASKED), zeros(), exp(score - *most));
      sums += weight;
      if constexpr (Cache::SCALED) {  // that of a token that is not seen may be anything, also NaN
        store(weights + sub * SUB, select(score <= all(MASKED), zeros(), weight * load<F16>(scratch.scales + (sub * SUB - start))));
      } else {
        Cache::pack_factors(weights + sub * SUB, weight);
      }
    }
    *total = sum(sums);
  }

  template <int R, int WIDTH>
  MEMBER void weigh(int row, int64_t first_sub, int64_t last_sub, int column, float* out) const {
    F16 acc[R][WIDTH];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < WIDTH; v++) acc[r][v] = zeros();
    const Weight* weights = (const Weight*)scratch.weights + (int64_t)row * CHUNK - start;
    for (int64_t sub = first_sub; sub <= last_sub; sub++) {
      const Element* from = values(sub) + column * Cache::TOKENS;
      for (int u = 0; u < SUB / Cache::TOKENS; u++, from += heads.head_dim * Cache::TOKENS) {
        typename Cache::Values numbers[WIDTH];
        UNROLL for (int v = 0; v < WIDTH; v++) numbers[v] = Cache::values(from + v * 16 * Cache::TOKENS);
        UNROLL for (int r = 0; r < R; r++) {
          const Weight* of_tokens = weights + (int64_t)r * CHUNK + sub * SUB + u * Cache::TOKENS;
          UNROLL for (int v = 0; v < WIDTH; v++) acc[r][v] = Cache::product(acc[r][v], numbers[v], of_tokens);
        }
      }
    }
    UNROLL for (int r = 0; r < R; r++) {
      UNROLL for (int v = 0; v < WIDTH; v++) store(out + (int64_t)(row + r) * heads.head_dim + column + v * 16, acc[r][v]);
    }
  }

  // What lies behind the last token may be anything, also NaN, which a weight of zero does not hide. Integers it does.
  const Element* values(int64_t sub) const {
    if (!Cache::SCALED && (sub + 1) * SUB > last_key + 1) return (const Element*)scratch.tail;
    return keys(sub) + SUB * heads.head_dim;
  }

  void make_tail() const {
    int64_t sub = last_key / SUB;
    int known = last_key % SUB + 1;
    if (Cache::SCALED || known == SUB) return;
    const Element* from = keys(sub) + SUB * heads.head_dim;
    Element* to = (Element*)scratch.tail;
    const int dim = heads.head_dim;
    int whole = known / Cache::TOKENS * Cache::TOKENS;
    memcpy(to, from, (size_t)whole * dim * sizeof(Element));
    memset(to + whole * dim, 0, (size_t)(SUB - whole) * dim * sizeof(Element));
    if (whole < known) {
      for (int i = 0; i < dim; i++) to[whole * dim + i * Cache::TOKENS] = from[whole * dim + i * Cache::TOKENS];
    }
  }

  template <int R>
  MEMBER void rows(int row, int64_t first_sub, int64_t last_sub, const Partial& found) const {
    constexpr int BLOCKS = LANES == 16 ? (R <= 3 ? 4 : R <= 6 ? 2 : 1) : 4 / R, WIDTH = LANES == 16 ? (R <= 6 ? 4 : 2) : 4 / R;
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
    in_blocks<ROWS_TOGETHER>(0, span.count * heads.ratio(), [&]<int R>(int64_t row) {
      rows<R>((int)row, first_key / SUB, last_key / SUB, found);
    });
  }
};

}  // namespace nonet
