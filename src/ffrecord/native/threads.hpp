// Runs that must wait for the disk, each in a blocking call, several at once.
//
// Threads live for one batch: starting one costs less than one wait for the disk, none is left for
// a fork to lose, and a batch that is all in the page cache starts none.
#pragma once

#include <atomic>
#include <system_error>
#include <thread>

#include "batch.hpp"

namespace ffrecord {

constexpr size_t kMostThreads = 16;

inline void read_by_threads(Batch &batch, const std::vector<Run> &runs) {
  std::atomic<size_t> next{0};
  auto work = [&] {
    for (size_t i; (i = next.fetch_add(1)) < runs.size();) read_run(batch, runs[i], 0);
  };
  std::vector<std::thread> threads;
  try {
    while (threads.size() + 1 < std::min(runs.size(), kMostThreads)) threads.emplace_back(work);
  } catch (const std::system_error &) {
    // No more threads are allowed: those there are do it.
  }
  work();
  for (std::thread &thread : threads) thread.join();
}

}  // namespace ffrecord
