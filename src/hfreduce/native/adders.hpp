// Threads that add what GPUs have copied out, chunk after chunk.
//
// Each takes the next piece of the oldest chunk that has any left, so that one that is slow, or still
// waking, holds nobody up. The thread that serves the calls says up to which chunk all parts have
// arrived and looks whether a chunk is done; it never waits for them, so that it can feed the streams
// meanwhile. Adders look for the next chunk for a while and then sleep.
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
  // `work(thread, chunk, piece)` adds a piece of a chunk. `first` is the first chunk there will be,
  // and at most `slots` in a row are under way.
  Adders(int count, uint32_t first, int slots, int looks, std::function<void(int, uint32_t, int)> work)
      : work_(std::move(work)), looks_(looks), begin_(first), chunks_(static_cast<size_t>(slots)) {
    here_.value.store(first);
    // Signals go to Python's main thread, which can act on them.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      for (int number = 0; number < count; ++number)
        threads_.emplace_back([this, number, first] { serve(number, first); });
    } catch (...) {
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      end();
      throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  Adders(const Adders &) = delete;
  ~Adders() { end(); }

  // All parts of a chunk have arrived, which is to be added in so many pieces: one at least, and
  // fewer than 2^15. Chunks come in order; those that are left out are nobody's to add.
  void arrived(uint32_t chunk, int pieces) {
    if (here_.value.load(std::memory_order_relaxed) != chunk) begin_.store(chunk);
    Shared &shared = chunks_[chunk % chunks_.size()];
    shared.done.store(0, std::memory_order_relaxed);
    shared.ticket.store(uint64_t{chunk} << 32 | static_cast<uint64_t>(pieces) << 16);
    here_.value.store(chunk + 1, std::memory_order_seq_cst);
    rouse();
  }

  // There will soon be something to add: who sleeps begins to look.
  void rouse() {
    if (!here_.waiters.load(std::memory_order_seq_cst)) return;
    roused_.fetch_add(1, std::memory_order_seq_cst);
    wake(here_, kEachWakes);
  }

  // How many pieces of a chunk under way are added.
  int done(uint32_t chunk) const {
    return chunks_[chunk % chunks_.size()].done.load(std::memory_order_acquire);
  }

 private:
  // What threads have taken and done of the chunk that is in a slot.
  struct alignas(64) Shared {
    // The chunk's number, 32 bits; its pieces, 16; how many have been taken, 16. Whoever takes one
    // so learns of which chunk it is, though it looked for an older one.
    std::atomic<uint64_t> ticket{0};
    std::atomic<int> done{0};
  };

  static uint32_t pieces_of(uint64_t ticket) { return ticket >> 16 & 0xffff; }
  static uint32_t taken_of(uint64_t ticket) { return ticket & 0xffff; }

  void serve(int number, uint32_t chunk) {
    for (;;) {
      if (!await(chunk)) return;
      if (const uint32_t begin = begin_.load(); static_cast<int32_t>(begin - chunk) > 0)
        chunk = begin;
      Shared &shared = chunks_[chunk % chunks_.size()];
      uint64_t ticket = shared.ticket.load();
      if (taken_of(ticket) < pieces_of(ticket)) ticket = shared.ticket.fetch_add(1);
      const uint32_t found = static_cast<uint32_t>(ticket >> 32), piece = taken_of(ticket);
      if (piece < pieces_of(ticket)) {
        work_(number, found, static_cast<int>(piece));
        shared.done.fetch_add(1, std::memory_order_release);
        chunk = found;
      } else {
        chunk = static_cast<int32_t>(found - chunk) > 0 ? found + 1 : chunk + 1;
      }
    }
  }

  // Returns when the chunk has arrived, or false at the end.
  bool await(uint32_t chunk) {
    uint32_t roused = roused_.load();
    int looks = 0;
    for (;;) {
      const uint32_t here = here_.value.load(std::memory_order_acquire);
      if (static_cast<int32_t>(here - chunk) > 0) return true;
      if (ending_.load()) return false;
      if (++looks < looks_) {
        cpu_pause();
        continue;
      }
      here_.waiters.fetch_add(1, std::memory_order_seq_cst);
      if (here_.value.load(std::memory_order_seq_cst) == here && !ending_.load() &&
          roused_.load(std::memory_order_seq_cst) == roused)
        sleep_on(here_, here, 500'000'000);
      here_.waiters.fetch_sub(1, std::memory_order_seq_cst);
      if (const uint32_t now = roused_.load(); now != roused) {
        // One thread waking all others takes 30 µs for each on a virtual machine.
        if (here_.waiters.load()) wake(here_, kEachWakes);
        roused = now;
        looks = 0;
      }
    }
  }

  void end() {
    ending_.store(true);
    wake_all(here_);
    for (std::thread &thread : threads_) thread.join();
    threads_.clear();
  }

  static constexpr int kEachWakes = 2;

  const std::function<void(int, uint32_t, int)> work_;
  const int looks_;  // at the word before sleeping, some 50 ns each
  Word here_{};
  std::atomic<uint32_t> begin_;             // of the chunks after the last gap
  alignas(64) std::atomic<uint32_t> roused_{0};  // how often
  std::vector<Shared> chunks_;
  std::atomic<bool> ending_{false};
  std::vector<std::thread> threads_;
};

}  // namespace hfreduce
