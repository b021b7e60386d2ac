// A team of threads that runs one function together, step after step: one thread per core, the caller is the first.
#pragma once
#include <atomic>
#include <functional>
#include <thread>
#include <vector>

namespace nonet {

INLINE void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

constexpr int MOST_SPINS = 4000;  // about 60 us

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
    for (int turn = 0;;) {
      for (int spins = 0; turn_.load(std::memory_order_acquire) == turn; pause()) {
        if (++spins > 20000) turn_.wait(turn);  // about 100 us: the next step is not near
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
