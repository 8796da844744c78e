// Runs of a file read to their places, each chunk hashed while it is in the cache.
#pragma once

#include <cstring>
#include <string>

#include "calls.hpp"
#include "hash.hpp"

namespace checkpoint {

// Copied and then hashed from the second-level cache, which has 1 MiB and more where it matters.
constexpr size_t kReadPiece = 256 << 10;

// Whole chunks of one slice, or the end of one.
struct Run {
  int64_t offset;      // in the file
  char *data;
  size_t size;
  const char *hashes;  // of each chunk, Hash::kDigits each; null: nothing is compared
};

struct Failure {
  int64_t run = -1;   // -1: none
  int code = 0;       // an errno, kEnded, or 0: a hash differs
  size_t chunk = 0;   // of the run
  std::string found;  // its hash
};

class Reader {
 public:
  Reader(int descriptor, size_t chunk) : descriptor_(descriptor), chunk_(chunk) {}

  Failure read(const std::vector<Run> &runs) {
    for (size_t at = 0; at < runs.size();) {
      // Small runs that follow each other in the file are one call.
      size_t end = at, size = 0;
      views_.clear();
      while (end < runs.size() && views_.size() < kMostViews &&
             runs[end].size <= kReadPiece - size &&
             (end == at || runs[end].offset == runs[end - 1].offset +
                                                   static_cast<int64_t>(runs[end - 1].size))) {
        views_.push_back({runs[end].data, runs[end].size});
        size += runs[end++].size;
      }
      if (end == at) {
        if (!read_large(runs[at])) return failed(at);
        ++at;
        continue;
      }
      failure_.code = read_all(descriptor_, views_.data(), views_.size(), runs[at].offset);
      if (failure_.code) {
        // Which of them it was is found out one by one.
        for (; at < end; ++at)
          if (!read_large(runs[at])) return failed(at);
        continue;
      }
      for (; at < end; ++at)
        if (!check_small(runs[at])) return failed(at);
    }
    return {};
  }

 private:
  Failure failed(size_t run) {
    failure_.run = static_cast<int64_t>(run);
    return failure_;
  }

  bool read_large(const Run &run) {
    for (size_t begin = 0; begin < run.size; begin += chunk_) {
      const size_t end = std::min(run.size, begin + chunk_);
      hash_.reset();
      for (size_t at = begin; at < end;) {
        const size_t size = std::min(end - at, kReadPiece);
        iovec view{run.data + at, size};
        failure_.code = read_all(descriptor_, &view, 1, run.offset + static_cast<int64_t>(at));
        if (failure_.code) return false;
        if (run.hashes) hash_.update(run.data + at, size);
        at += size;
      }
      if (run.hashes && !agrees(run, begin / chunk_)) return false;
    }
    return true;
  }

  // A run of kReadPiece at most may still have several chunks, where chunks are small.
  bool check_small(const Run &run) {
    for (size_t begin = 0; run.hashes && begin < run.size; begin += chunk_) {
      hash_.reset();
      hash_.update(run.data + begin, std::min(chunk_, run.size - begin));
      if (!agrees(run, begin / chunk_)) return false;
    }
    return true;
  }

  bool agrees(const Run &run, size_t chunk) {
    char digits[Hash::kDigits];
    hash_.digest(digits);
    if (!std::memcmp(digits, run.hashes + chunk * Hash::kDigits, Hash::kDigits)) return true;
    failure_.code = 0;
    failure_.chunk = chunk;
    failure_.found.assign(digits, Hash::kDigits);
    return false;
  }

  const int descriptor_;
  const size_t chunk_;
  Hash hash_;
  Failure failure_;
  std::vector<iovec> views_;
};

}  // namespace checkpoint
