// When each chunk of a call on a GPU passed each stage, for whoever asks why a call is slow.
//
// Off, a note is one comparison. On (HFREDUCE_TRACE=1 when the path is made) each thread writes into
// a row of its own, up to a fixed number of notes, so that tracing takes no lock and moves no memory.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

namespace hfreduce {

// In the order in which a chunk passes them; Python's names are in hfreduce/cuda.py.
enum class Stage : uint8_t {
  kAllowed,   // the host let the copy out begin
  kArrived,   // the host saw it end
  kGathered,  // the host saw all ranks' copies
  kAdding,    // a thread began to add
  kAdded,     // it was done
  kCombined,  // the host saw all its threads done
  kGone,      // the host let the copy back begin, all ranks' sums being there
  kReturned,  // the host saw it end
};

class Trace {
 public:
  struct Note {
    int64_t nanoseconds;  // of the monotonic clock, which all processes of a machine share
    uint32_t chunk;
    int16_t lane;  // of a thread that adds; -1: the server
    Stage stage;
  };

  explicit Trace(int lanes) {
    const char *asked = std::getenv("HFREDUCE_TRACE");
    if (!asked || std::string(asked) == "0" || !*asked) return;
    rows_.resize(static_cast<size_t>(lanes) + 1);
    for (auto &row : rows_) row.reserve(kMost);
  }

  // Called by one thread for each lane.
  void note(Stage stage, uint32_t chunk, int lane = -1) {
    if (rows_.empty()) return;
    auto &row = rows_[static_cast<size_t>(lane + 1)];
    if (row.size() == kMost) return;
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    const int64_t nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
    row.push_back({nanoseconds, chunk, static_cast<int16_t>(lane), stage});
  }
  // Of several chunks that were seen at once.
  void note(Stage stage, uint32_t begin, uint32_t end) {
    if (rows_.empty()) return;
    for (uint32_t chunk = begin; chunk != end; ++chunk) note(stage, chunk);
  }

  // What was noted since the last time; between calls.
  std::vector<Note> take() {
    std::vector<Note> all;
    for (auto &row : rows_) {
      all.insert(all.end(), row.begin(), row.end());
      row.clear();
    }
    return all;
  }

 private:
  static constexpr size_t kMost = 1 << 15;
  std::vector<std::vector<Note>> rows_;
};

}  // namespace hfreduce
