// What lies in the page cache, read at once: copying and checking is all there is to wait for, so a
// second thread halves it where a second core is free.
#pragma once

#include "threads.hpp"

namespace ffrecord {

constexpr int64_t kShare = 4096 * 1024;   // bytes of copying worth another thread
constexpr int64_t kPortion = 128 * 1024;  // bytes that a thread takes at a time
constexpr int64_t kTrial = 256 * 1024;    // bytes that show whether the batch is cached

// Reads what lies in the page cache, by up to `threads` threads, and returns the other runs.
inline std::vector<Run> read_cached(Batch &batch, const std::vector<Run> &runs, size_t threads) {
  std::vector<char> waits(runs.size());
  size_t tried = 0, misses = 0;
  int64_t bytes = 0;
  const auto attempt = [&](size_t i) {
    waits[i] = read_run(batch, runs[i], RWF_NOWAIT) == Outcome::would_wait;
  };
  for (; tried < runs.size() && bytes < kTrial; ++tried) {
    attempt(tried);
    misses += waits[tried];
    bytes += batch.length(runs[tried]);
  }
  if (tried < runs.size()) {
    // A portion is a range of runs: [portions[k], portions[k + 1]).
    std::vector<size_t> portions{tried};
    int64_t rest = 0, portion = 0;
    for (size_t i = tried; i < runs.size(); ++i) {
      if (portion >= kPortion) {
        portions.push_back(i);
        portion = 0;
      }
      portion += batch.length(runs[i]);
      rest += batch.length(runs[i]);
    }
    portions.push_back(runs.size());
    std::atomic<size_t> next{0};
    // A batch that is mostly not there is a matter of the disk, not of copying.
    const size_t worth = misses * 2 > tried ? 1 : static_cast<size_t>(rest / kShare) + 1;
    const auto work = [&] {
      for (size_t k; (k = next.fetch_add(1)) + 1 < portions.size();)
        for (size_t i = portions[k]; i < portions[k + 1]; ++i) attempt(i);
    };
    share(std::min(threads, worth), work);
  }
  std::vector<Run> cold;
  for (size_t i = 0; i < runs.size(); ++i)
    if (waits[i]) cold.push_back(runs[i]);
  return cold;
}

}  // namespace ffrecord
