// A batch of reads: what is wanted, merged into runs, and how each run ended.
#pragma once

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <mutex>
#include <vector>

#include "crc32.hpp"

namespace ffrecord {

struct Request {
  int descriptor;
  int64_t offset, length;
  uint8_t *to;
  uint32_t index;  // in the caller's order
};

// Requests first .. last - 1 (sorted) that follow each other in one file.
struct Run {
  size_t first, last;
};

struct Batch {
  std::vector<Request> requests;  // sorted by file and offset, none empty
  uint32_t *checksums;            // in the caller's order, or null

  // The failure with the lowest index wins, so that a batch fails the same way every time.
  int64_t failed = -1;
  int code = 0;  // errno; 0: the file ended
  std::mutex lock;

  void fail(const Request &request, int why) {
    std::lock_guard<std::mutex> guard(lock);
    if (failed >= 0 && failed <= request.index) return;
    failed = request.index;
    code = why;
  }

  // Every byte of the request is in its place.
  void complete(const Request &request) {
    if (checksums)
      checksums[request.index] = crc32(request.to, static_cast<size_t>(request.length));
  }

  int64_t length(const Run &run) const {
    return requests[run.last - 1].offset + requests[run.last - 1].length -
           requests[run.first].offset;
  }
};

constexpr size_t kMostBuffers = 64;           // in one call
constexpr int64_t kLongestRun = 1024 * 1024;  // bytes; one request may be longer

inline std::vector<Run> merge(const std::vector<Request> &requests) {
  std::vector<Run> runs;
  int64_t length = 0;
  for (size_t i = 0; i < requests.size(); ++i) {
    const Request &next = requests[i];
    if (i && runs.back().last - runs.back().first < kMostBuffers) {
      const Request &previous = requests[i - 1];
      if (previous.descriptor == next.descriptor &&
          previous.offset + previous.length == next.offset &&
          length + next.length <= kLongestRun) {
        runs.back().last = i + 1;
        length += next.length;
        continue;
      }
    }
    runs.push_back({i, i + 1});
    length = next.length;
  }
  return runs;
}

enum class Outcome { done, would_wait };

// Reads a run. With `flags` = RWF_NOWAIT it gives up where it would have to wait for the disk;
// otherwise it ends with every request completed or failed.
inline Outcome read_run(Batch &batch, const Run &run, int flags) {
  iovec buffers[kMostBuffers];
  const size_t count = run.last - run.first;
  const Request *requests = &batch.requests[run.first];
  for (size_t i = 0; i < count; ++i)
    buffers[i] = {requests[i].to, static_cast<size_t>(requests[i].length)};
  int64_t at = requests[0].offset;
  size_t current = 0;
  while (current < count) {
    const ssize_t got = preadv2(requests[0].descriptor, buffers + current,
                                static_cast<int>(count - current), at, flags);
    if (got < 0 && errno == EINTR) continue;
    // Whatever goes wrong without waiting (not supported, too) is for the next attempt to say.
    if (flags && got <= 0) return Outcome::would_wait;
    if (got <= 0) {
      batch.fail(requests[current], got < 0 ? errno : 0);
      return Outcome::done;
    }
    at += got;
    auto left = static_cast<size_t>(got);
    while (current < count && left >= buffers[current].iov_len) {
      left -= buffers[current].iov_len;
      batch.complete(requests[current++]);
    }
    if (left) {
      buffers[current].iov_base = static_cast<uint8_t *>(buffers[current].iov_base) + left;
      buffers[current].iov_len -= left;
    }
  }
  return Outcome::done;
}

}  // namespace ffrecord
