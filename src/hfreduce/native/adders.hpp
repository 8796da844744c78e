// Threads that add what GPUs have copied out, chunk after chunk, each its own part of every chunk.
//
// The thread that serves a call says up to which chunk all parts have arrived, and looks how far the
// adders are; it never waits for them, so that it can feed the streams meanwhile. Adders look for the
// next chunk for a while and then sleep.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "wait.hpp"

namespace hfreduce {

class Adders {
 public:
  // `work(lane, chunk)` adds a lane's part of a chunk. `first` is the first chunk there will be.
  Adders(int count, uint32_t first, int looks, std::function<void(int, uint32_t)> work)
      : work_(std::move(work)), looks_(looks), begin_(first), done_(static_cast<size_t>(count)) {
    here_.value.store(first);
    for (Word &word : done_) word.value.store(first);
    // Signals go to Python's main thread, which can act on them.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      for (int lane = 0; lane < count; ++lane)
        threads_.emplace_back([this, lane, first] { serve(lane, first); });
    } catch (...) {
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      end();
      throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  Adders(const Adders &) = delete;
  ~Adders() { end(); }

  // All parts of the chunks from `begin` to `end` have arrived. There may be a gap to what arrived
  // before, where all of that is done: nobody adds what lies in it.
  void arrived(uint32_t begin, uint32_t end) {
    if (here_.value.load(std::memory_order_relaxed) != begin) begin_.store(begin);
    here_.value.store(end, std::memory_order_seq_cst);
    rouse();
  }

  // There will soon be something to add: who sleeps begins to look.
  void rouse() {
    if (!here_.waiters.load(std::memory_order_seq_cst)) return;
    roused_.fetch_add(1, std::memory_order_seq_cst);
    wake(here_, kEachWakes);
  }

  // Up to which chunk all lanes have added.
  uint32_t done() const {
    uint32_t least = done_[0].value.load(std::memory_order_acquire);
    for (const Word &word : done_) {
      const uint32_t value = word.value.load(std::memory_order_acquire);
      if (static_cast<int32_t>(least - value) > 0) least = value;
    }
    return least;
  }

  // Returns when nothing is being added.
  void rest() const {
    while (done() != here_.value.load(std::memory_order_acquire)) sched_yield();
  }

 private:
  void serve(int lane, uint32_t next) {
    for (;;) {
      int looks = 0;
      uint32_t roused = roused_.load();
      while (here_.value.load(std::memory_order_acquire) == next) {
        if (ending_.load()) return;
        if (++looks < looks_) {
          cpu_pause();
          continue;
        }
        here_.waiters.fetch_add(1, std::memory_order_seq_cst);
        if (here_.value.load(std::memory_order_seq_cst) == next && !ending_.load() &&
            roused_.load(std::memory_order_seq_cst) == roused)
          sleep_on(here_, next, 500'000'000);
        here_.waiters.fetch_sub(1, std::memory_order_seq_cst);
        if (const uint32_t now = roused_.load(); now != roused) {
          // One thread waking all others takes 30 µs for each on a virtual machine.
          if (here_.waiters.load()) wake(here_, kEachWakes);
          roused = now;
          looks = 0;
        }
      }
      if (const uint32_t begin = begin_.load(); static_cast<int32_t>(begin - next) > 0) next = begin;
      work_(lane, next);
      done_[static_cast<size_t>(lane)].value.store(++next, std::memory_order_release);
    }
  }

  void end() {
    ending_.store(true);
    wake_all(here_);
    for (std::thread &thread : threads_) thread.join();
    threads_.clear();
  }

  static constexpr int kEachWakes = 2;

  const std::function<void(int, uint32_t)> work_;
  const int looks_;  // at the word before sleeping, some 50 ns each
  Word here_{};
  std::atomic<uint32_t> begin_;  // of the chunks after the last gap
  alignas(64) std::atomic<uint32_t> roused_{0};  // how often
  std::vector<Word> done_;
  std::atomic<bool> ending_{false};
  std::vector<std::thread> threads_;
};

}  // namespace hfreduce
