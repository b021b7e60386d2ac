#include "program.h"

#include "ahead.h"
#include "ceilings.h"

#include <algorithm>
#include <cstdlib>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace nonet {

// Zeroed memory at multiples of 64 bytes, in large pages where the system has them.
class Memory {
 public:
  Memory() = default;
  Memory(const Memory&) = delete;
  ~Memory() { std::free(data_); }
  void* at_least(size_t size) {
    if (size <= size_) return data_;
    std::free(data_);
    data_ = nullptr, size_ = 0;
    const size_t page = size < (2 << 20) ? 64 : 2 << 20, rounded = (size + page - 1) / page * page;
    data_ = std::aligned_alloc(page, rounded);
    if (data_ == nullptr) throw std::bad_alloc();
#if defined(__linux__)
    if (page > 64) madvise(data_, rounded, MADV_HUGEPAGE);
#endif
    memset(data_, 0, rounded);
    size_ = rounded;
    return data_;
  }
  template <class T>
  T* array(size_t count) {
    return (T*)at_least(count * sizeof(T) + 64);
  }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

struct FloatBuffer {
  Memory memory;
  float* data = nullptr;
  int width = 0;
  float* row(int64_t index) const { return data + index * width; }
};

struct RowsBuffer {
  Memory floats, factors, bytes, words, scales, sums, totals;
  Rows rows{};
  int format = 0;
  void reserve(int64_t count, int width) {
    int stride = padded(width);
    rows.stride = stride;
    if (format == FLOAT32) rows.floats = floats.array<float>(count * stride);
    if (format == BFLOAT16) rows.factors = factors.array<Factor>(count * stride);
    if (format < INT8) return;
    rows.bytes = bytes.array<int8_t>(count * stride);
    if (sizeof(Digit) > 1) rows.words = words.array<int16_t>(count * stride);
    rows.scales = scales.array<float>(count * stride / GROUP);
    rows.sums = sums.array<int32_t>(count * stride / GROUP);
    rows.totals = totals.array<float>(count * stride / GROUP);
  }
};

// The largest logit that a thread has seen of one row, for each column of a tile.
struct Best {
  F16 values[2] = {all(-INFINITY), all(-INFINITY)};
  I16 tiles[2] = {}, no_numbers = {};
};

struct Worker {
  Memory bytes, factors, products, row, queries, scores, weights, tail, scales, partials, other, best;
};

constexpr int ROWS_AT_ONCE = 72;    // of activations that one tile of weights is used for, and that stay in cache
constexpr int MOST_ROWS_AT_ONCE = 96;  // where they are all rows of a step
constexpr int MOST_ROUNDS = 4;      // of an operation
constexpr int FEW_ROWS = 8, MOST_TILES = 16;  // with few rows a thread takes several tiles at once

class Program {
 public:
  explicit Program(const Model& model)
      : ops_(model.ops, model.ops + model.num_ops),
        matrices_(model.matrices, model.matrices + model.num_matrices),
        ropes_(model.ropes, model.ropes + model.num_ropes),
        shapes_(model.buffers, model.buffers + model.num_buffers),
        cache_format_((int32_t)model.cache_format),
        floats_(model.num_buffers),
        rows_(model.num_buffers),
        cosines_(model.num_ropes),
        team_(*model.team),
        rounds_(team_.size(), model.num_ops * MOST_ROUNDS + model.num_ropes),
        workers_(new Worker[model.team->size()]) {
    for (const Op& op : ops_) {
      if (op.code == ATTENTION) num_groups_ = std::max(num_groups_, op.group + 1), num_layers_ = std::max(num_layers_, op.layer + 1);
    }
    for (int thread = 0; thread < team_.size(); thread++) reserve_scratch(thread);
  }

  ~Program() { settle(); }

  void run(const Step& step) {
    std::lock_guard<std::recursive_mutex> lock(team_.mutex);
    if (is_begun_ && next_.is(step)) {
      team_.join();
      is_begun_ = false;
      next_.hand_over(step);
      counts_.used++;
    } else {
      settle();
      prepare(step);
      team_.run(walk_);
    }
    if (step.best != nullptr && step.num_requests <= step.most_ahead && team_.size() > 1 && next_.follow(step, num_groups_, num_layers_)) {
      prepare(next_.step());
      is_begun_ = true;
      counts_.begun++;
      team_.begin(walk_, &settle_);
    }
  }

  // Nothing goes on any more, and nothing is read or written until the next step.
  void settle() {
    std::lock_guard<std::recursive_mutex> lock(team_.mutex);
    if (!is_begun_) return;
    is_given_up_.store(true);
    team_.end();
    is_begun_ = false;
    is_given_up_.store(false);
  }

  AheadCounts counts() const { return counts_; }

 private:
  // All memory of a step is there before it begins: threads that work on it cannot fail.
  void prepare(const Step& step) {
    step_ = &step;
    reserve(step.num_tokens, std::max(step.num_logits, 1));
    make_spans();
    size_t most = 0;
    for (const Op& op : ops_) {
      if (op.code == ATTENTION && is_split(op)) most = std::max(most, spans_.size() * op.heads.num_kv_heads * num_chunks() * partial_size(op));
    }
    if (most) partials_.array<float>(most);
    rounds_.reset();
  }

  void walk(int thread) {
    int round = 0;
    timed(thread, ops_.size(), [&] { rotations(thread, round); });
    for (size_t i = 0; i < ops_.size() && !is_given_up_.load(std::memory_order_relaxed); i++) {
      timed(thread, i, [&] { perform(ops_[i], thread, round); });
    }
  }

  template <class Work>
  void timed(int thread, size_t index, Work work) {
    if (thread != 0 || step_->seconds == nullptr) return work();
    waited_ = 0.0;
    double start = seconds_now();
    work();
    step_->seconds[2 * index] += seconds_now() - start;
    step_->seconds[2 * index + 1] += waited_;
  }

  // --- memory ---

  void reserve(int64_t tokens, int64_t logits) {
    for (size_t i = 0; i < shapes_.size(); i++) {
      int64_t count = std::max(tokens, logits);
      if (shapes_[i].format < 0) {
        floats_[i].width = shapes_[i].width;
        floats_[i].data = shapes_[i].format == INPUT    ? step_->input
                          : shapes_[i].format == OUTPUT ? step_->output
                                                        : floats_[i].memory.array<float>(count * shapes_[i].width);
      } else {
        rows_[i].format = shapes_[i].format;
        rows_[i].reserve(count, shapes_[i].width);
      }
    }
    for (size_t i = 0; i < ropes_.size(); i++) cosines_[i].array<float>(tokens * ropes_[i].half * 2);
    for (int thread = 0; thread < team_.size() && step_->best != nullptr; thread++) {
      Best* found = workers_[thread].best.array<Best>(logits);
      for (int r = 0; r < logits; r++) found[r] = Best();
    }
  }

  void reserve_scratch(int thread) {
    int widest = 0;
    for (const Buffer& buffer : shapes_) widest = std::max(widest, buffer.width);
    spare(thread, widest);
    for (const Op& op : ops_) {
      if (op.code == LINEAR || op.code == GATED || op.code == LOGITS) {
        scratch(thread, matrices_[op.matrix]);
        workers_[thread].products.array<float>((size_t)MOST_ROWS_AT_ONCE * TILE * (op.code == GATED ? 2 : 1));
      } else if (op.code == ATTENTION) {
        attention_scratch(op, thread);
        const int rows = std::max(MOST_ROWS, op.heads.ratio());
        partial(workers_[thread].partials, rows, op.heads.head_dim), partial(workers_[thread].other, rows, op.heads.head_dim);
      }
    }
  }

  // --- who does what ---

  // Calls work(index, following) for each of `total` indices once, over all threads; then all meet.
  template <class Work>
  void each(int total, int grain, int thread, int& round, Work work) {
    int found = rounds_.share(round, total, grain, thread, work);
    double start = step_->seconds == nullptr ? 0.0 : seconds_now();
    rounds_.meet(round++, total, found);
    if (step_->seconds != nullptr && thread == 0) waited_ += seconds_now() - start;
  }

  template <class Work>
  void each_token(int thread, int& round, Work work) {
    each(step_->num_tokens, step_->num_tokens >= 64 ? 8 : 1, thread, round, work);
  }

  void perform(const Op& op, int thread, int& round) {
    switch (op.code) {
      case EMBED: return embed(op, thread, round);
      case NORM: return norm(op, thread, round);
      case LINEAR: return linear(op, thread, round);
      case GATED: return gated(op, thread, round);
      case ATTENTION:
        if (cache_format_ == FLOAT32) return attention<FloatCache>(op, thread, round);
        if (cache_format_ == INT8) return attention<Int8Cache>(op, thread, round);
        return attention<BfloatCache>(op, thread, round);
      case NORM_ADD: return norm_add(op, thread, round);
      case CONVERT: return convert(op, thread, round);
      case LOGITS: return logits(op, thread, round);
    }
  }

  // --- rows ---

  // cos and sin of every position: [T, 2, half].
  void rotations(int thread, int& round) {
    for (size_t r = 0; r < ropes_.size(); r++) {
      const Rope& rope = ropes_[r];
      float* to = cosines_[r].array<float>(0);
      each_token(thread, round, [&](int token, int) {
        float* cosines = to + (int64_t)token * rope.half * 2;
        for (int i = 0; i < rope.half; i++) {
          float angle = (float)step_->positions[token] * rope.frequencies[i];
          cosines[i] = std::cos(angle) * rope.scale;
          cosines[rope.half + i] = std::sin(angle) * rope.scale;
        }
      });
    }
  }

  void embed(const Op& op, int thread, int& round) {
    FloatBuffer& target = floats_[op.target];
    each_token(thread, round, [&](int token, int) {
      const int64_t id = step_->token_ids[token];
      float* to = target.row(token);
      if (op.matrix >= 0) {
        unpacked_row(matrices_[op.matrix], id, to);
      } else if (op.option == FLOAT32) {
        memcpy(to, (const float*)op.table + id * target.width, target.width * sizeof(float));
      } else {
        const uint16_t* from = (const uint16_t*)op.table + id * target.width;
        for (int i = 0; i < target.width; i += 16) store(to + i, load_bf16(from + i));
      }
      for (int i = 0; i < target.width; i += 16) store(to + i, load<F16>(to + i) * op.factor);
    });
  }

  // The width is a multiple of 16 (`padded` up to 32 in rows: what is beyond stays zero).
  static void normalise(const float* from, const float* weight, int width, float eps, float* to) {
    F16 squares = zeros();
    for (int i = 0; i < width; i += 16) {
      F16 value = load<F16>(from + i);
      squares = value * value + squares;
    }
    float scale = 1.0f / std::sqrt(sum(squares) / (float)width + eps);
    for (int i = 0; i < width; i += 16) store(to + i, load<F16>(from + i) * scale * load<F16>(weight + i));
  }

  float* spare(int thread, int width) { return workers_[thread].row.array<float>(padded(width) + 32); }

  void norm(const Op& op, int thread, int& round) {
    const FloatBuffer& source = floats_[op.source];
    float* row = spare(thread, source.width);
    each_token(thread, round, [&](int token, int) {
      normalise(source.row(token), op.weight, source.width, op.eps, row);
      for (int i = source.width; i < padded(source.width); i++) row[i] = 0.0f;
      put(rows_[op.target].rows, rows_[op.target].format, token, 0, row, padded(source.width));
    });
  }

  void norm_add(const Op& op, int thread, int& round) {
    const FloatBuffer& source = floats_[op.source];
    float* row = spare(thread, source.width);
    each_token(thread, round, [&](int token, int) {
      normalise(source.row(token), op.weight, source.width, op.eps, row);
      float* to = floats_[op.target].row(token);
      for (int i = 0; i < source.width; i += 16) store(to + i, load<F16>(to + i) + load<F16>(row + i));
    });
  }

  void convert(const Op& op, int thread, int& round) {
    const FloatBuffer& source = floats_[op.source];
    float* row = spare(thread, source.width);
    each_token(thread, round, [&](int token, int) {
      memcpy(row, source.row(token), source.width * sizeof(float));
      for (int i = source.width; i < padded(source.width); i++) row[i] = 0.0f;
      put(rows_[op.target].rows, rows_[op.target].format, token, 0, row, padded(source.width));
    });
  }

  // --- matrices ---

  Scratch scratch(int thread, const Matrix& matrix) {
    const size_t k = padded(matrix.k);
    Worker& worker = workers_[thread];
    if (matrix.format == BFLOAT16 && UNPACKS_BFLOAT16) return {nullptr, worker.factors.array<float>(k * TILE)};
    if (matrix.format != INT4 || !UNPACKS_INT4) return {};
    return {worker.bytes.array<uint8_t>(k * TILE), worker.factors.array<float>(k / GROUP * 64)};
  }

  // Calls work(tile, row, count, products) for all tiles and blocks of rows; products [count, stride] are those of the tile, or
  // of two that are half the matrix apart.
  template <class Work>
  void tiles(const Op& op, const Rows& rows, int num_rows, int together, int thread, int& round, Work work) {
    const Matrix& matrix = matrices_[op.matrix];
    int blocks = num_rows <= MOST_ROWS_AT_ONCE ? 1 : (num_rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE, most = blocks == 1 ? num_rows : ROWS_AT_ONCE;
    int items = matrix.num_tiles / together, stride = together * TILE, total = items * blocks;
    float* products = workers_[thread].products.array<float>((size_t)most * stride);
    Scratch room = scratch(thread, matrix);
    int grain = num_rows > FEW_ROWS ? 1 : std::clamp(total / (team_.size() * 8), 1, MOST_TILES);
    each(total, grain, thread, round, [&](int index, int following) {
      int item = index % items, row = index / items * most, count = std::min(most, num_rows - row);
      for (int t = 0; t < together; t++) {
        const uint8_t* next = t + 1 < together     ? matrix.tile(item + items)
                              : following < total ? matrix.tile(following % items)
                                                  : upcoming(op, thread);
        product(matrix, rows, row, count, item + t * items, products + t * TILE, stride, room, next);
      }
      work(item, row, count, products);
    });
  }

  // Where a thread begins in the matrix behind this one.
  const uint8_t* upcoming(const Op& op, int thread) const {
    const Op* last = ops_.data() + ops_.size();
    for (const Op* next = &op + 1; next < last; next++) {
      if (next->code != LINEAR && next->code != GATED && next->code != LOGITS) continue;
      const Matrix& matrix = matrices_[next->matrix];
      int items = next->code == GATED ? matrix.num_tiles / 2 : matrix.num_tiles;
      return matrix.tile((int)((int64_t)items * thread / team_.size()));
    }
    return matrices_[op.matrix].data;
  }

  void linear(const Op& op, int thread, int& round) {
    const FloatBuffer& target = floats_[op.target];
    tiles(op, rows_[op.source].rows, step_->num_tokens, 1, thread, round, [&](int tile, int row, int count, const float* from) {
      int width = std::min(TILE, target.width - tile * TILE);
      for (int r = 0; r < count; r++, from += TILE) {
        float* to = target.row(row + r) + tile * TILE;
        int i = 0;
        for (; i + 16 <= width; i += 16) {
          F16 value = load<F16>(from + i);
          store(to + i, op.option & ADD ? load<F16>(to + i) + value : value);
        }
        for (; i < width; i++) to[i] = op.option & ADD ? to[i] + from[i] : from[i];
      }
    });
  }

  INLINE F16 activated(int32_t kind, F16 value) {
    if (kind == SILU) return value / (1.0f + exp(-value));
    if (kind == GELU_TANH) return 0.5f * value * (1.0f + tanh(0.797884561f * (value + 0.044715f * value * value * value)));
    alignas(64) float found[16];
    store(found, value);
    for (float& each : found) each = 0.5f * each * (1.0f + std::erf(each * 0.707106781f));
    return load<F16>(found);
  }

  void gated(const Op& op, int thread, int& round) {
    RowsBuffer& target = rows_[op.target];
    tiles(op, rows_[op.source].rows, step_->num_tokens, 2, thread, round, [&](int item, int row, int count, const float* from) {
      alignas(64) float made[TILE];
      for (int r = 0; r < count; r++, from += 2 * TILE) {
        for (int i = 0; i < TILE; i += 16) store(made + i, activated(op.option, load<F16>(from + i)) * load<F16>(from + TILE + i));
        put(target.rows, target.format, row + r, item * TILE, made, TILE);
      }
    });
  }

  void logits(const Op& op, int thread, int& round) {
    const FloatBuffer& source = floats_[op.source];
    RowsBuffer& wanted = rows_[op.target];
    float* row = spare(thread, source.width);
    each(step_->num_logits, 1, thread, round, [&](int index, int) {
      normalise(source.row(step_->wanted[index]), op.weight, source.width, op.eps, row);
      for (int i = source.width; i < padded(source.width); i++) row[i] = 0.0f;
      put(wanted.rows, wanted.format, index, 0, row, padded(source.width));
    });
    const Matrix& matrix = matrices_[op.matrix];
    auto capped = [&](int count, float* from) {
      if (op.factor == 0.0f) return;
      for (int i = 0; i < count * TILE; i += 16) store(from + i, tanh(load<F16>(from + i) / op.factor) * op.factor);
    };
    if (step_->best != nullptr) return best_logits(op, wanted.rows, capped, thread, round);
    tiles(op, wanted.rows, step_->num_logits, 1, thread, round, [&](int tile, int first, int count, float* from) {
      int width = std::min(TILE, matrix.n - tile * TILE);
      capped(count, from);
      for (int r = 0; r < count; r++, from += TILE) {
        memcpy(step_->logits + (int64_t)(first + r) * matrix.n + tile * TILE, from, width * sizeof(float));
      }
    });
  }

  // No logit is kept but the largest, and of equal ones that of the lowest id, in whatever order a thread has its tiles.
  template <class Capped>
  void best_logits(const Op& op, const Rows& rows, Capped capped, int thread, int& round) {
    const Matrix& matrix = matrices_[op.matrix];
    Best* found = workers_[thread].best.array<Best>(0);
    tiles(op, rows, step_->num_logits, 1, thread, round, [&](int tile, int first, int count, float* from) {
      capped(count, from);
      for (int r = 0; r < count; r++, from += TILE) {
        for (int i = matrix.n - tile * TILE; i < TILE; i++) from[i] = -INFINITY;
        Best& best = found[first + r];
        UNROLL for (int half = 0; half < 2; half++) {
          F16 value = load<F16>(from + half * 16);
          I16 larger = (value > best.values[half]) | ((value == best.values[half]) & (all_int(tile) < best.tiles[half]));
          best.no_numbers |= value != value;
          best.values[half] = select(larger, value, best.values[half]);
          best.tiles[half] = select(larger, all_int(tile), best.tiles[half]);
        }
      }
    });
    each(step_->num_logits, 1, thread, round, [&](int row, int) { join_best(row); });
  }

  void join_best(int row) {
    float peak = -INFINITY;
    int64_t id = 0;
    bool no_number = false;
    for (int thread = 0; thread < team_.size(); thread++) {
      const Best& best = workers_[thread].best.array<Best>(0)[row];
      for (int i = 0; i < TILE; i++) {
        float value = lane(best.values[i / 16], i % 16);
        int64_t at = (int64_t)lane(best.tiles[i / 16], i % 16) * TILE + i;
        no_number |= lane(best.no_numbers, i % 16) != 0;
        if (value > peak || (value == peak && at < id)) peak = value, id = at;
      }
    }
    step_->best[row] = id;
    step_->peaks[row] = no_number ? NAN : peak;
  }

  // --- attention ---

  // Tokens of a request in spans, by how many query heads share a kv head. Those that read most come first.
  void make_spans() {
    spans_.clear();
    single_ = true;
    int ratio = 1;
    for (const Op& op : ops_) {
      if (op.code == ATTENTION) ratio = std::max(ratio, op.heads.ratio());
    }
    const int most = std::max(1, std::min(4, MOST_ROWS / ratio));
    for (int request = 0; request < step_->num_requests; request++) {
      int row = step_->query_start[request], end = step_->query_start[request + 1];
      single_ &= end - row <= most;
      for (; row < end; row += most) spans_.push_back({request, row, std::min(most, end - row), step_->positions[row]});
    }
    std::stable_sort(spans_.begin(), spans_.end(), [](const Span& a, const Span& b) { return a.position > b.position; });
  }

  INLINE void rotate(const float* from, const float* cosines, int half, float* to) {
    const float* sines = cosines + half;
    if (half % 16 == 0) {
      for (int i = 0; i < half; i += 16) {
        F16 a = load<F16>(from + i), b = load<F16>(from + half + i), c = load<F16>(cosines + i), s = load<F16>(sines + i);
        store(to + i, a * c - b * s);
        store(to + half + i, b * c + a * s);
      }
    } else {
      for (int i = 0; i < half; i++) {
        float a = from[i], b = from[half + i];
        to[i] = a * cosines[i] - b * sines[i];
        to[half + i] = b * cosines[i] + a * sines[i];
      }
    }
  }

  // One head of one token: norm, rotation. `room` and the result [head_dim].
  const float* turned(const Op& op, const float* from, const float* weight, int token, float* room) {
    alignas(64) float normed[512];
    if (op.rope < 0) return from;
    const Rope& rope = ropes_[op.rope];
    if (weight != nullptr) {
      normalise(from, weight, op.heads.head_dim, op.eps, normed);
      from = normed;
    }
    rotate(from, cosines_[op.rope].array<float>(0) + (int64_t)token * rope.half * 2, rope.half, room);
    return room;
  }

  template <class Cache>
  void write_token(const Op& op, int token, int kv_head) {
    const Heads& heads = op.heads;
    const float* all_heads = floats_[op.source].row(token);
    alignas(64) float room[512];
    const float* key = turned(op, all_heads + (heads.num_heads + kv_head) * heads.head_dim, op.key_weight, token, room);
    const float* value = all_heads + (heads.num_heads + heads.num_kv_heads + kv_head) * heads.head_dim;
    write_kv<Cache>(step_->caches[op.layer], heads, step_->slots[op.group][token], kv_head, key, value);
  }

  AttentionScratch attention_scratch(const Op& op, int thread) {
    size_t rows = std::max(MOST_ROWS, op.heads.ratio()), dim = op.heads.head_dim;
    Worker& worker = workers_[thread];
    return {worker.queries.array<float>(rows * (dim + 2)), worker.scores.array<float>(rows * CHUNK),
            worker.weights.array<float>(rows * CHUNK), worker.tail.array<float>(SUB * dim), worker.scales.array<float>(CHUNK)};
  }

  template <class Cache>
  void pack_queries(const Op& op, const Span& span, int kv_head, const AttentionScratch& room) {
    const Heads& heads = op.heads;
    const int stride = heads.head_dim / Cache::PACK + Cache::EXTRA;
    alignas(64) float turning[512];
    typename Cache::Query* to = (typename Cache::Query*)room.queries;
    for (int c = 0; c < span.count; c++) {
      for (int j = 0; j < heads.ratio(); j++, to += stride) {
        const float* from = floats_[op.source].row(span.row + c) + (kv_head * heads.ratio() + j) * heads.head_dim;
        const float* query = turned(op, from, op.weight, span.row + c, turning);
        pack_query<Cache>(to, query, heads.head_dim, heads.scale);
      }
    }
  }

  Partial partial(Memory& memory, int rows, int dim) {
    float* data = memory.array<float>((size_t)rows * (dim + 2) + 64);
    return {data, data + rows, data + (2 * rows + 15) / 16 * 16};
  }

  int64_t first_key(const Op& op, const Span& span) const {
    return op.heads.window ? std::max<int64_t>(0, span.position - op.heads.window + 1) : 0;
  }

  // What the rows of a span see in one chunk.
  template <class Cache>
  void attend(const Op& op, const Span& span, int kv_head, int64_t chunk, const AttentionScratch& room, const Partial& found) {
    Pages pages{step_->tables[op.group] + (int64_t)span.request * step_->num_columns, step_->block_size};
    int64_t start = chunk * CHUNK, last = span.position + span.count - 1;
    ChunkWork<Cache> work{op.heads,
                          pages,
                          span,
                          kv_head,
                          step_->caches[op.layer],
                          room,
                          std::max(start, first_key(op, span)),
                          std::min(start + CHUNK - 1, last),
                          start};
    work.run(found);
  }

  void merge(const Partial& to, const Partial& from, int rows, int dim) {
    for (int r = 0; r < rows; r++) {
      merge_row(to.most + r, to.total + r, to.values + (int64_t)r * dim, from.most[r], from.total[r], from.values + (int64_t)r * dim, dim);
    }
  }

  void finish(const Op& op, const Span& span, int kv_head, const Partial& found) {
    const int ratio = op.heads.ratio(), dim = op.heads.head_dim, width = ratio * dim;
    for (int r = 0; r < span.count * ratio; r++) {
      float inverse = 1.0f / found.total[r];
      float* values = found.values + (int64_t)r * dim;
      for (int i = 0; i < dim; i += 16) store(values + i, load<F16>(values + i) * inverse);
    }
    for (int c = 0; c < span.count; c++) {
      const float* from = found.values + (int64_t)c * width;
      if (shapes_[op.target].format < 0) {
        memcpy(floats_[op.target].row(span.row + c) + kv_head * width, from, width * sizeof(float));
      } else {
        put(rows_[op.target].rows, rows_[op.target].format, span.row + c, kv_head * width, from, width);
      }
    }
  }

  template <class Cache>
  void attention(const Op& op, int thread, int& round) {
    const int heads = op.heads.num_kv_heads;
    if (!single_) {
      each(step_->num_tokens * heads, 8, thread, round, [&](int index, int) { write_token<Cache>(op, index / heads, index % heads); });
    }
    if (is_split(op)) return split_attention<Cache>(op, thread, round);
    int items = (int)spans_.size() * heads;
    AttentionScratch room = attention_scratch(op, thread);
    each(items, 1, thread, round, [&](int index, int) {
      const Span& span = spans_[index / heads];
      const int kv_head = index % heads, rows = span.count * op.heads.ratio(), dim = op.heads.head_dim;
      if (single_) {
        for (int c = 0; c < span.count; c++) write_token<Cache>(op, span.row + c, kv_head);
      }
      pack_queries<Cache>(op, span, kv_head, room);
      Partial found = partial(workers_[thread].partials, rows, dim), other = partial(workers_[thread].other, rows, dim);
      int64_t chunk = first_key(op, span) / CHUNK, last = (span.position + span.count - 1) / CHUNK;
      attend<Cache>(op, span, kv_head, chunk, room, found);
      while (++chunk <= last) {
        attend<Cache>(op, span, kv_head, chunk, room, other);
        merge(found, other, rows, dim);
      }
      finish(op, span, kv_head, found);
    });
  }

  bool is_split(const Op& op) const {
    const int items = (int)spans_.size() * op.heads.num_kv_heads;
    return items < 3 * team_.size() && team_.size() > 1 && !spans_.empty() && spans_[0].position >= 2 * CHUNK;
  }

  int num_chunks() const { return (int)((spans_[0].position + spans_[0].count - 1) / CHUNK) + 1; }  // the first span reads most

  int partial_size(const Op& op) const {
    return (std::max(MOST_ROWS, op.heads.ratio()) * (op.heads.head_dim + 2) + 64 + 15) / 16 * 16;
  }

  // Few rows with long contexts: every chunk is an item of its own, and the results are joined in order afterwards.
  template <class Cache>
  void split_attention(const Op& op, int thread, int& round) {
    const int heads = op.heads.num_kv_heads, dim = op.heads.head_dim;
    const int rows = std::max(MOST_ROWS, op.heads.ratio()), size = partial_size(op), chunks = num_chunks();
    if (single_) {
      each(step_->num_tokens * heads, 1, thread, round, [&](int index, int) { write_token<Cache>(op, index / heads, index % heads); });
    }
    float* all_partials = partials_.array<float>(0);
    auto at = [&](int item, int chunk) {
      float* data = all_partials + ((int64_t)item * chunks + chunk) * size;
      return Partial{data, data + rows, data + (2 * rows + 15) / 16 * 16};
    };
    auto seen = [&](const Span& span, int chunk) {
      return chunk >= first_key(op, span) / CHUNK && chunk <= (span.position + span.count - 1) / CHUNK;
    };
    AttentionScratch room = attention_scratch(op, thread);
    each((int)spans_.size() * heads * chunks, 1, thread, round, [&](int index, int) {
      int item = index / chunks, chunk = index % chunks;
      const Span& span = spans_[item / heads];
      if (!seen(span, chunk)) return;
      pack_queries<Cache>(op, span, item % heads, room);
      attend<Cache>(op, span, item % heads, chunk, room, at(item, chunk));
    });
    each((int)spans_.size() * heads, 1, thread, round, [&](int item, int) {
      const Span& span = spans_[item / heads];
      int chunk = (int)(first_key(op, span) / CHUNK);
      Partial found = at(item, chunk);
      while (++chunk < chunks && seen(span, chunk)) merge(found, at(item, chunk), span.count * op.heads.ratio(), dim);
      finish(op, span, item % heads, found);
    });
  }

  const std::vector<Op> ops_;
  const std::vector<Matrix> matrices_;
  const std::vector<Rope> ropes_;
  const std::vector<Buffer> shapes_;
  const int32_t cache_format_;
  std::vector<FloatBuffer> floats_;
  std::vector<RowsBuffer> rows_;
  std::vector<Memory> cosines_;
  Memory partials_;
  Team& team_;
  Rounds rounds_;
  std::unique_ptr<Worker[]> workers_;
  std::vector<Span> spans_;
  bool single_ = true;  // each request has one span
  const Step* step_ = nullptr;
  double waited_ = 0.0;  // of the first thread
  int num_groups_ = 1, num_layers_ = 1;
  NextStep next_;
  AheadCounts counts_;
  bool is_begun_ = false;  // `next_`, by all threads but the first
  std::atomic<bool> is_given_up_{false};
  const std::function<void(int)> walk_ = [this](int thread) { walk(thread); };
  const std::function<void()> settle_ = [this] { settle(); };
};

}  // namespace nonet

extern "C" {

int nonet_abi() { return 6; }

void* nonet_team(int num_threads) {
  try {
    return new nonet::Team(num_threads);
  } catch (...) {
    return nullptr;
  }
}

void* nonet_new(const nonet::Model* model) {
  try {
    return new nonet::Program(*model);
  } catch (...) {
    return nullptr;
  }
}

int nonet_step(void* program, const nonet::Step* step) {
  try {
    ((nonet::Program*)program)->run(*step);
    return 0;
  } catch (...) {
    return 1;
  }
}

// Rates [2]: bytes read and operations, per second.
int nonet_ceilings(void* team, int32_t format, double* rates) {
  try {
    std::lock_guard<std::recursive_mutex> lock(((nonet::Team*)team)->mutex);
    nonet::Memory memory;
    const uint8_t* data = memory.array<uint8_t>(nonet::READ_BYTES + 8192);
    rates[0] = nonet::bytes_per_second(*(nonet::Team*)team, data);
    rates[1] = nonet::operations_per_second(*(nonet::Team*)team, format);
    return 0;
  } catch (...) {
    return 1;
  }
}

// Steps that were begun before they were asked for, and those of them that were asked for.
void nonet_counts(void* program, nonet::AheadCounts* counts) { *counts = ((nonet::Program*)program)->counts(); }

void nonet_settle(void* program) { ((nonet::Program*)program)->settle(); }

void nonet_free(void* program) { delete (nonet::Program*)program; }
}
