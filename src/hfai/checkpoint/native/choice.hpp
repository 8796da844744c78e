// Which of two ways of writing to a file in memory is quicker here, from what each has taken.
//
// It depends on more than can be asked: huge pages need no lock of the file, and save most of the
// search for pages; but to fill them with zeros is slow where a virtual machine's host must find
// their memory first, and to gather them takes a call to every processor.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>

namespace checkpoint {

class Choice {
 public:
  enum Way { kSmall, kHuge };
  static constexpr int kFree = -1;

  // Returns the way to take now; `trial`: to learn what it costs, so a little of it will do.
  Way next(bool &trial) {
    const int forced = forced_.load(order);
    if (forced != kFree) {
      trial = false;
      return static_cast<Way>(forced);
    }
    const double small = cost_[kSmall].load(order), huge = cost_[kHuge].load(order);
    trial = huge == 0;
    if (trial) return kHuge;
    if (small == 0) return kSmall;
    const Way best = huge <= small ? kHuge : kSmall;
    if (left_.fetch_sub(1, order) > 0) return best;
    const int wait = std::min(2 * wait_.load(order), kMostBetween);
    wait_.store(wait, order);
    left_.store(wait, order);
    trial = true;
    return best == kHuge ? kSmall : kHuge;
  }

  void took(Way way, double seconds, size_t bytes) {
    const double found = seconds / static_cast<double>(bytes), before = cost_[way].load(order);
    // What is better counts at once, what is worse by halves: other threads may have hindered it.
    cost_[way].store(before == 0 || found < before ? found : (before + found) / 2, order);
  }

  // For tests: always take this one; kFree: do not.
  void force(int way) { forced_.store(way, order); }

  void cannot(Way way) { cost_[way].store(kNever, order); }  // until a trial succeeds

 private:
  static constexpr auto order = std::memory_order_relaxed;
  static constexpr double kNever = 1e9;      // seconds a byte
  static constexpr int kMostBetween = 64;    // calls between two trials
  std::atomic<double> cost_[2] = {0, 0};     // seconds a byte; 0: not known
  std::atomic<int> left_{4}, wait_{4};       // calls until the next trial, and from that to one more
  std::atomic<int> forced_{kFree};
};

inline Choice choice;  // of this process

class Stopwatch {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began_).count();
  }

 private:
  const std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
};

}  // namespace checkpoint
