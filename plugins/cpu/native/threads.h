// A team of threads that runs steps together: one thread per core, the caller is the first.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#endif

namespace nonet {

INLINE void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

inline double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

constexpr int MOST_SPINS = 2000;  // about 20 us: far more than threads of equal work are apart

// Keeps a thread on its core where the team has all of them: two of its threads would else often share one, each waiting for the other.
class OwnCore {
 public:
  OwnCore(int index, int num_threads) {
#if defined(__linux__)
    if (num_threads == 1 || sched_getaffinity(0, sizeof before_, &before_) != 0 || CPU_COUNT(&before_) != num_threads) return;
    cpu_set_t own;
    CPU_ZERO(&own);
    for (int cpu = 0, seen = 0; cpu < CPU_SETSIZE; cpu++) {
      if (CPU_ISSET(cpu, &before_) && seen++ == index) CPU_SET(cpu, &own);
    }
    kept_ = sched_setaffinity(0, sizeof own, &own) == 0;
#endif
  }
  OwnCore(const OwnCore&) = delete;
#if defined(__linux__)
  ~OwnCore() {
    if (kept_) sched_setaffinity(0, sizeof before_, &before_);
  }

 private:
  cpu_set_t before_;
  bool kept_ = false;
#endif
};

class Team {
 public:
  std::recursive_mutex mutex;  // of all that run, begin or end: models of a process share a team

  explicit Team(int size) : size_(size) {
    try {
      for (int index = 1; index < size; index++) threads_.emplace_back([this, index] { serve(index); });
    } catch (...) {  // the system gives no more: threads that nobody has joined would end the process
      stop();
      throw;
    }
  }
  ~Team() { stop(); }
  int size() const { return size_; }

  // Calls work(index) on the caller's thread, and on every other one that comes before that has returned: what one would do, the
  // others do where another program has its core. Returns when none is at it any more.
  void run(const std::function<void(int)>& work) {
    begin(work, nullptr);
    join();
  }

  // The same in two parts: in between the others are at it alone. `give_up` ends that, in case there is something else to run.
  void begin(const std::function<void(int)>& work, const std::function<void()>* give_up) {
    if (give_up_ != nullptr) (*give_up_)();
    give_up_ = give_up;
    work_ = &work;
    turn_.fetch_add(1);  // odd: open
    turn_.notify_all();
  }
  void join() {
    OwnCore core(0, size_);
    (*work_)(0);
    end();
  }
  void end() {
    turn_.fetch_add(1);
    int present;
    for (int spins = 0; (present = present_.load()) != 0; pause()) {
      if (++spins > MOST_SPINS) present_.wait(present);
    }
    give_up_ = nullptr;
  }

 private:
  void stop() {
    stopped_ = true;
    turn_.fetch_add(2);
    turn_.notify_all();
    for (auto& thread : threads_) thread.join();
  }
  void serve(int index) {
    OwnCore core(index, size_);
    for (int seen = 0;;) {
      int turn = seen;
      for (int spins = 0; (turn = turn_.load()) == seen || turn % 2 == 0; pause()) {
        if (stopped_) return;
        if (++spins > 5000) turn_.wait(turn);  // about 50 us: the next step is not near
      }
      present_.fetch_add(1);
      if (turn_.load() == turn) (*work_)(index);
      present_.fetch_sub(1);
      present_.notify_all();
      seen = turn;
    }
  }

  const int size_;
  std::vector<std::thread> threads_;
  const std::function<void(int)>* work_ = nullptr;
  const std::function<void()>* give_up_ = nullptr;
  std::atomic<bool> stopped_{false};
  alignas(64) std::atomic<int> turn_{0};
  alignas(64) std::atomic<int> present_{0};
};

// Items of work that a team shares, one round of them after another. A thread has a region of its own in each round, whose data
// lie together, and then takes what is left of the others'. A round ends when all its items are done, and not when all threads
// have come: one that comes late finds what is left.
class Rounds {
 public:
  Rounds(int num_threads, int most) : num_regions_(num_threads), most_(most), taken_(new std::atomic<int>[num_threads * most]), done_(new std::atomic<int>[most]) {
    reset();
  }

  // Before a step, while no thread is at it.
  void reset() {
    for (int i = 0; i < num_regions_ * most_; i++) taken_[i].store(0, std::memory_order_relaxed);
    for (int i = 0; i < most_; i++) done_[i].store(0, std::memory_order_relaxed);
  }

  // Calls work(index, following) for items of `total`, `grain` at a time; `following` is what this thread most likely has next, or
  // `total`. Returns the number that this thread had.
  template <class Work>
  int share(int round, int total, int grain, int thread, Work work) {
    int found = 0;
    for (int i = 0; i < num_regions_; i++) {
      const int region = (thread + i) % num_regions_;
      const int end = (int64_t)total * (region + 1) / num_regions_, start = (int64_t)total * region / num_regions_;
      std::atomic<int>& taken = taken_[region * most_ + round];
      if (i > 0 && start + taken.load(std::memory_order_relaxed) >= end) continue;
      for (int first; (first = start + taken.fetch_add(grain, std::memory_order_relaxed)) < end;) {
        const int last = std::min(first + grain, end);
        for (int index = first; index < last; index++) work(index, index + 1 < end ? index + 1 : total);
        found += last - first;
      }
    }
    return found;
  }

  // All threads come here with what they had; none goes on before all items are done. They are a few microseconds apart, so it
  // spins; where another program has the other thread's core, it sleeps, and leaves that thread its own.
  void meet(int round, int total, int found) {
    std::atomic<int>& done = done_[round];
    if (found && done.fetch_add(found, std::memory_order_acq_rel) + found == total) return done.notify_all();
    for (int spins = 0;; pause()) {
      int seen = done.load(std::memory_order_acquire);
      if (seen == total) return;
      if (++spins > MOST_SPINS) done.wait(seen, std::memory_order_acquire);
    }
  }

 private:
  const int num_regions_, most_;
  const std::unique_ptr<std::atomic<int>[]> taken_, done_;
};

}  // namespace nonet
