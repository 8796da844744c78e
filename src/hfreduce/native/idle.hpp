// Looking at several things at once, where no futex can wait for them.
#pragma once

#include <algorithm>

#include "wait.hpp"

namespace hfreduce {

// What a thread does that has found nothing to do: looks again at once, soon, later.
class Idle {
 public:
  Idle(const Waiter &waiter, int looks) : waiter_(waiter), looks_(std::max(looks, 200)) {}
  Status step(bool moved, int blamed) {
    if (moved) {
      tries_ = 0;
      return {};
    }
    if (++tries_ < looks_) {
      cpu_pause();
      return {};
    }
    const auto now = Waiter::Clock::now();
    if (tries_ == looks_) since_ = looked_ = now;
    // The GPU may be computing for long before a gradient is ready.
    const long pause = now - since_ < std::chrono::milliseconds(5) ? 10'000 : 100'000;
    const timespec request{0, pause};
    nanosleep(&request, nullptr);
    if (now - looked_ < std::chrono::milliseconds(20)) return {};
    looked_ = now;
    return waiter_.checked(blamed, since_);
  }

 private:
  const Waiter &waiter_;
  const int64_t looks_;
  int64_t tries_ = 0;
  Waiter::Clock::time_point since_, looked_;
};

}  // namespace hfreduce
