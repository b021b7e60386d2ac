// A team of threads that runs one function together, step after step: one thread per core, the caller is the first.
#pragma once
#include <atomic>
#include <functional>
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
  explicit Team(int size) : size_(size) {
    for (int index = 1; index < size; index++) threads_.emplace_back([this, index] { serve(index); });
  }
  ~Team() {
    stopped_ = true;
    turn_.fetch_add(1);
    turn_.notify_all();
    for (auto& thread : threads_) thread.join();
  }
  int size() const { return size_; }

  // Calls work(index) on every thread, and returns when all are done.
  void run(const std::function<void(int)>& work) {
    OwnCore core(0, size_);
    work_ = &work;
    turn_.fetch_add(1);
    turn_.notify_all();
    work(0);
    wait_all();
  }

  // All threads come here before any goes on. They are a few microseconds apart, so it spins; where another program has the other
  // thread's core, it sleeps, and leaves that thread its own.
  void wait_all() {
    if (size_ == 1) return;
    int round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      round_.notify_all();
      return;
    }
    for (int spins = 0; round_.load(std::memory_order_acquire) == round; pause()) {
      if (++spins > MOST_SPINS) round_.wait(round, std::memory_order_acquire);
    }
  }

 private:
  void serve(int index) {
    OwnCore core(index, size_);
    for (int turn = 0;;) {
      for (int spins = 0; turn_.load(std::memory_order_acquire) == turn; pause()) {
        if (++spins > 5000) turn_.wait(turn);  // about 50 us: the next step is not near
      }
      turn = turn_.load();
      if (stopped_) return;
      (*work_)(index);
      wait_all();
    }
  }

  const int size_;
  std::vector<std::thread> threads_;
  const std::function<void(int)>* work_ = nullptr;
  std::atomic<bool> stopped_{false};
  alignas(64) std::atomic<int> turn_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> round_{0};
};

}  // namespace nonet
