// An all-reduce of a tensor on a GPU, and the chunks that it goes in.
#pragma once

#include <algorithm>
#include <cstdint>

#include "reduce.hpp"

namespace hfreduce {

struct GpuCall {
  uint64_t tensor = 0;  // its address on the GPU
  int64_t count = 0;
  Dtype dtype = Dtype::kFloat32;
  Op op = Op::kSum;
  uint32_t first = 0;  // the call's first chunk

  int64_t item() const { return static_cast<int64_t>(kItemBytes[static_cast<size_t>(dtype)]); }
};

// About eight chunks, as many as keep both directions and the adders busy: a chunk costs some 10 µs
// beside its bytes. Where there are several, they are smaller at both ends, since nothing comes back
// before the first is out, and nothing goes out beside the last.
class Cut {
 public:
  // Every chunk has at most `most_bytes`, a multiple of 4096.
  Cut(const GpuCall &call, int64_t most_bytes) : count_(call.count) {
    const int64_t item = call.item();
    const int64_t full = std::min(std::max(count_ * item / kChunks, kLeastBytes), most_bytes);
    unit_ = (full + 4 * kPageBytes - 1) / (4 * kPageBytes) * kPageBytes / item;
    if (4 * unit_ * item > most_bytes) unit_ = most_bytes / item / 4 / kAligned * kAligned;
    ramped_ = count_ >= 12 * unit_;
    inner_ = ramped_ ? aligned(count_ - 3 * unit_) : count_;
    const int64_t before = ramped_ ? 3 * unit_ : 0;
    middle_ = std::max<int64_t>(1, (inner_ - before + 4 * unit_ - 1) / (4 * unit_));
  }

  int64_t chunks() const { return ramped_ ? middle_ + 4 : middle_; }
  // Elements before a chunk, which are whole cache lines.
  int64_t begin(int64_t i) const {
    if (!ramped_) return std::min(count_, 4 * unit_ * i);
    if (i < 2) return unit_ * i;
    if (i < middle_ + 2) return unit_ * (4 * i - 5);
    if (i == middle_ + 2) return inner_;
    return i == middle_ + 3 ? aligned(count_ - unit_) : count_;
  }
  int64_t size(int64_t i) const { return begin(i + 1) - begin(i); }

 private:
  static constexpr int64_t kLeastBytes = 512 << 10, kChunks = 8, kPageBytes = 4096;
  static constexpr int64_t kAligned = 64;  // elements: a cache line at least, of any type
  static int64_t aligned(int64_t elements) { return elements / kAligned * kAligned; }

  int64_t count_, unit_, inner_, middle_;  // unit: a quarter of a full chunk
  bool ramped_;
};

}  // namespace hfreduce
