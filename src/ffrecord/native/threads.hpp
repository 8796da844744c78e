// Work that several threads share, and runs that wait for the disk in blocking calls.
//
// Threads work for one batch: starting one (about 20 µs) costs less than one wait for the disk, and
// none is left for a fork to lose.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <system_error>
#include <thread>

#include "batch.hpp"

namespace ffrecord {

constexpr size_t kMostThreads = 16;

// Calls `work` in up to `count` threads, the calling one among them. `work` takes its share from a
// counter and must not throw; what no other thread takes, the calling one does. A thread that a busy
// machine has not let run by then is not waited for: it finds the door closed.
template <class Work>
inline void share(size_t count, Work &work) {
  struct Door {
    std::mutex lock;
    std::condition_variable left;
    size_t inside = 0;
    bool closed = false;
  };
  const auto door = std::make_shared<Door>();
  const auto help = [door, &work] {
    {
      std::lock_guard<std::mutex> guard(door->lock);
      if (door->closed) return;
      ++door->inside;
    }
    work();
    std::lock_guard<std::mutex> guard(door->lock);
    --door->inside;
    door->left.notify_one();
  };
  try {
    for (size_t started = 1; started < count; ++started) std::thread(help).detach();
  } catch (const std::system_error &) {
    // No more threads are allowed: those there are do it.
  }
  work();
  std::unique_lock<std::mutex> guard(door->lock);
  door->closed = true;
  door->left.wait(guard, [&] { return !door->inside; });
}

inline void read_by_threads(Batch &batch, const std::vector<Run> &runs) {
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i; (i = next.fetch_add(1)) < runs.size();) read_run(batch, runs[i], 0);
  };
  share(std::min(runs.size(), kMostThreads), work);
}

}  // namespace ffrecord
