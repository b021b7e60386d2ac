// A model as a list of operations, and one step of it: prefill chunks and decodes in one flat axis of T tokens.
//
// The list is made in Python from the architecture (plugins/cpu/program.py), once. A step runs it from front to back on all
// threads of a team, which meet behind each part. Structs here are those of plugins/cpu/records.py, field by field.
#pragma once
#include <memory>

#include "attention.h"
#include "threads.h"

namespace nonet {

enum Code : int32_t {
  EMBED = 0,      // table rows of the tokens -> floats
  NORM = 1,       // floats -> rows: root mean square norm
  LINEAR = 2,     // rows x matrix -> floats
  GATED = 3,      // rows x matrix of gate, then up -> rows: activation(gate) * up
  ATTENTION = 4,  // floats (q, k, v of each token) -> rows, or floats
  NORM_ADD = 5,   // floats += norm of floats
  CONVERT = 6,    // floats -> rows
  LOGITS = 7,     // floats of the wanted tokens -> norm -> matrix -> logits
};
enum Activation : int32_t { SILU = 0, GELU_TANH = 1, GELU = 2 };
enum Flags : int32_t { ADD = 1 };  // LINEAR: to what is there

struct Op {
  int32_t code, source, target, matrix;  // buffers, and an index of a matrix
  int32_t layer, group, rope, option;    // ATTENTION: cache, block tables, rotation (-1: none); an Activation or Flags
  Heads heads;
  float eps, factor;           // norm; EMBED: scale of the embedding, LOGITS: soft cap
  const float* weight;         // of a norm; ATTENTION: of queries, or null
  const float* key_weight;     // ATTENTION: of keys, or null
  const void* table;           // EMBED
};

enum Kind : int32_t { FLOATS = -1, INPUT = -2, OUTPUT = -3 };  // floats [T, width], those of a step's `input`, or `output`

struct Buffer {
  int32_t width, format;  // numbers of a row; one of Kind, or the Format of the matrix that reads the rows
};

struct Rope {
  const float* frequencies;  // [half]
  int32_t half;
  float scale;  // of cos and sin
};

struct Step {
  int32_t num_tokens, num_requests, num_logits, num_columns;  // T, N, R; entries of a row of a block table
  const int64_t* token_ids;         // [T]
  const int64_t* positions;         // [T]
  const int32_t* query_start;       // [N + 1]
  const int32_t* const* tables;     // of each group [N, num_columns]
  const int64_t* const* slots;      // of each group [T]
  const int64_t* wanted;            // [R] tokens
  void* const* caches;              // of each layer
  float* logits;                    // [R, vocab_size], or null where `best` is wanted
  int64_t* best;                    // [R] ids of the largest logits, the lowest among equals
  float* peaks;                     // [R] those logits; NaN where a row has one
  float* input;                     // of the buffer of that kind
  float* output;
  int64_t block_size;
  int64_t most_ahead;               // requests whose next tokens are begun when these are known; 0: none
  double* seconds;                  // [num_ops + 1, 2] that the first thread took, and of these waited; or null. The last: rotations
};

struct Model {
  int32_t num_ops, num_buffers, num_matrices, num_ropes;
  const Op* ops;
  const Buffer* buffers;
  const Matrix* matrices;
  const Rope* ropes;
  Team* team;
  int64_t cache_format;  // FLOAT32, BFLOAT16 or INT8
};

}  // namespace nonet
