// The step that most likely comes next: the same requests, each with the token that it just got, at the next position.
#pragma once
#include <cstring>
#include <vector>

#include "program.h"

namespace nonet {

struct AheadCounts {
  int64_t begun = 0, used = 0;
};

// A step with memory of its own.
class NextStep {
 public:
  const Step& step() const { return step_; }

  // False: nothing can be said of it, as where a request's next token needs a block that it does not have yet.
  bool follow(const Step& last, int num_groups, int num_layers) {
    const int count = last.num_requests, columns = last.num_columns;
    if (last.num_tokens != count || last.num_logits != count) return false;
    positions_.resize(count);
    tables_.resize(num_groups), slots_.resize(num_groups), table_rows_.resize(num_groups), slot_rows_.resize(num_groups);
    for (int i = 0; i < count; i++) {
      positions_[i] = last.positions[i] + 1;
      if (last.wanted[i] != i || positions_[i] / last.block_size >= columns) return false;
    }
    for (int group = 0; group < num_groups; group++) {
      const int32_t* table = last.tables[group];
      slots_[group].resize(count);
      for (int i = 0; i < count; i++) {
        const int64_t block = table[(int64_t)i * columns + positions_[i] / last.block_size];
        if (block < 0) return false;
        slots_[group][i] = block * last.block_size + positions_[i] % last.block_size;
      }
      tables_[group].assign(table, table + (int64_t)count * columns);
      table_rows_[group] = tables_[group].data(), slot_rows_[group] = slots_[group].data();
    }
    ids_.assign(last.best, last.best + count);
    starts_.assign(last.query_start, last.query_start + count + 1);
    wanted_.assign(last.wanted, last.wanted + count);
    caches_.assign(last.caches, last.caches + num_layers);
    best_.resize(count), peaks_.resize(count);
    step_ = last;
    step_.token_ids = ids_.data(), step_.positions = positions_.data(), step_.query_start = starts_.data();
    step_.tables = table_rows_.data(), step_.slots = slot_rows_.data(), step_.wanted = wanted_.data();
    step_.caches = caches_.data(), step_.best = best_.data(), step_.peaks = peaks_.data(), step_.seconds = nullptr;
    return true;
  }

  // Whether `asked` is this very step: a table may have got more entries, behind those that are read.
  bool is(const Step& asked) const {
    const int count = step_.num_requests;
    if (asked.num_tokens != count || asked.num_requests != count || asked.num_logits != count || asked.best == nullptr) return false;
    if (asked.block_size != step_.block_size || asked.input != step_.input || asked.output != step_.output) return false;
    if (!same(asked.token_ids, ids_) || !same(asked.positions, positions_) || !same(asked.query_start, starts_)) return false;
    if (!same(asked.wanted, wanted_) || !same(asked.caches, caches_)) return false;
    for (size_t group = 0; group < tables_.size(); group++) {
      if (!same(asked.slots[group], slots_[group])) return false;
      for (int i = 0; i < count; i++) {
        const int64_t size = positions_[i] / step_.block_size + 1;
        const int32_t* own = tables_[group].data() + (int64_t)i * step_.num_columns;
        if (size > asked.num_columns) return false;
        if (memcmp(asked.tables[group] + (int64_t)i * asked.num_columns, own, size * sizeof *own) != 0) return false;
      }
    }
    return true;
  }

  void hand_over(const Step& asked) const {
    memcpy(asked.best, best_.data(), best_.size() * sizeof best_[0]);
    memcpy(asked.peaks, peaks_.data(), peaks_.size() * sizeof peaks_[0]);
  }

 private:
  template <class T>
  static bool same(const T* given, const std::vector<std::remove_const_t<T>>& own) {
    return memcmp(given, own.data(), own.size() * sizeof(T)) == 0;
  }

  std::vector<int64_t> ids_, positions_, wanted_, best_;
  std::vector<int32_t> starts_;
  std::vector<float> peaks_;
  std::vector<void*> caches_;
  std::vector<std::vector<int32_t>> tables_;
  std::vector<std::vector<int64_t>> slots_;
  std::vector<const int32_t*> table_rows_;
  std::vector<const int64_t*> slot_rows_;
  Step step_{};
};

}  // namespace nonet
