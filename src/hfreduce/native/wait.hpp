// Waiting for another rank: pause, then yield, then sleep in the kernel until woken.
//
// Data mostly arrive within microseconds, and then a loop that pauses sees them first. Who waits
// longer gives up the processor, and who waits for long sleeps on a futex: woken by the rank that
// advances the word, and every 50 ms to look whether the group is broken, the rank dead or too late.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstddef>
#include <functional>

#include "peers.hpp"
#include "segment.hpp"

namespace hfreduce {

// The numbers are part of the shared layout; Python's are in hfreduce/errors.py.
enum class Reason : uint32_t { kNone, kDead, kLate, kClosed, kMismatch, kInterrupted, kForked, kNetwork };

struct Status {
  Reason reason = Reason::kNone;
  int rank = -1;        // that is to blame
  bool told = false;    // another rank found out

  explicit operator bool() const { return reason == Reason::kNone; }
  uint64_t packed() const {
    return static_cast<uint64_t>(reason) << 32 | static_cast<uint32_t>(rank);
  }
  static Status unpacked(uint64_t value) {
    return {static_cast<Reason>(value >> 32), static_cast<int>(value & 0xffffffffu), true};
  }
};

inline void cpu_pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline void sleep_on(const Word &word, uint32_t seen, long nanoseconds) {
  const timespec limit{0, nanoseconds};
  syscall(SYS_futex, &word.value, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

inline void wake(const Word &word, int most) {
  syscall(SYS_futex, &word.value, FUTEX_WAKE, most, nullptr, nullptr, 0);
}

inline void wake_all(const Word &word) { wake(word, INT_MAX); }

inline void advance(Word &word, uint32_t value) {
  word.value.store(value, std::memory_order_seq_cst);
  if (word.waiters.load(std::memory_order_seq_cst)) wake_all(word);
}

inline bool reached(const Word &word, uint32_t target) {
  return static_cast<int32_t>(word.value.load(std::memory_order_acquire) - target) >= 0;
}

class Waiter {
 public:
  using Clock = std::chrono::steady_clock;

  Segment *segment = nullptr;
  Peers *peers = nullptr;
  int self = 0;  // this rank
  std::atomic<Clock::duration> timeout{Clock::duration::zero()};  // may change during calls
  int pauses = 0, yields = 0;                 // before the next stage
  const std::atomic<bool> *stopping = nullptr;  // this rank is closing
  std::function<bool()> interrupted;          // whether a signal's handler raised

  // Returns when `word`, which `rank` advances, has reached `target`, or with what is wrong.
  Status until(Word &word, uint32_t target, int rank) const {
    for (int i = 0; i < pauses; ++i) {
      if (reached(word, target)) return {};
      cpu_pause();
    }
    for (int i = 0; i < yields; ++i) {
      if (reached(word, target)) return {};
      sched_yield();
    }
    return asleep(word, target, rank);
  }

  // What is wrong where `rank` has been waited for since then, if anything; the group breaks with it.
  Status checked(int rank, Clock::time_point since) const {
    const Status status = look(rank, since);
    return status || status.told ? status : broken(status);
  }

  // Breaks the group for all its ranks; the first reason stays.
  Status broken(Status why) const {
    uint64_t none = 0;
    if (segment->header().failure.compare_exchange_strong(none, why.packed())) return why;
    return Status::unpacked(none);
  }

 private:
  static constexpr long kSleep = 50'000'000;  // ns

  Status asleep(Word &word, uint32_t target, int rank) const {
    const auto start = Clock::now();
    word.waiters.fetch_add(1, std::memory_order_seq_cst);
    Status status;
    for (;;) {
      const uint32_t seen = word.value.load(std::memory_order_seq_cst);
      if (static_cast<int32_t>(seen - target) >= 0) break;
      sleep_on(word, seen, kSleep);
      if (reached(word, target)) break;
      status = look(rank, start);
      if (status) status = missing(word, target, rank);
      // What a rank did before it died or closed counts; a signal's exception is raised in any case.
      if (!status && (status.reason == Reason::kInterrupted || !reached(word, target))) break;
      status = {};
    }
    word.waiters.fetch_sub(1, std::memory_order_seq_cst);
    const bool whole = status.reason == Reason::kNone || status.told;
    return whole ? status : broken(status);
  }

  Status look(int rank, Clock::time_point start) const {
    if (const uint64_t failure = segment->header().failure.load()) return Status::unpacked(failure);
    if (stopping && stopping->load()) return {Reason::kClosed, -1, true};
    if (interrupted && interrupted()) return {Reason::kInterrupted, self};
    if (segment->member(rank).state.load() == State::kClosed) return {Reason::kClosed, rank};
    if (peers->is_dead(rank)) return {Reason::kDead, rank};
    if (Clock::now() - start > timeout.load()) return {Reason::kLate, rank};
    return {};
  }

  // Whether a rank that has left, not only the one waited for, never reached `target`: every rank
  // passes every chunk, so the call cannot end. The ranks' words of one lane lie in a row.
  Status missing(const Word &word, uint32_t target, int rank) const {
    for (int r = 0; r < segment->shape().world; ++r) {
      if (r == rank || r == self) continue;
      const Word &theirs = *reinterpret_cast<const Word *>(
          reinterpret_cast<const char *>(&word) +
          (r - rank) * static_cast<std::ptrdiff_t>(sizeof(Progress)));
      if (reached(theirs, target)) continue;
      Reason reason = Reason::kNone;
      if (segment->member(r).state.load() == State::kClosed) reason = Reason::kClosed;
      else if (peers->is_dead(r)) reason = Reason::kDead;
      if (reason != Reason::kNone && !reached(theirs, target)) return {reason, r};
    }
    return {};
  }
};

}  // namespace hfreduce
