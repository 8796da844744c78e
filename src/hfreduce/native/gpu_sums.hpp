// The sums of what GPUs have copied out: this rank's slice of a chunk, in pieces that threads take.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "dispatch.hpp"
#include "gpu_call.hpp"
#include "past_caches.hpp"
#include "segment.hpp"

namespace hfreduce {

class GpuSums {
 public:
  GpuSums(const Segment &segment, const Table &table, int rank)
      : segment_(segment), table_(table), rank_(rank), world_(segment.shape().world),
        chunk_bytes_(static_cast<int64_t>(segment.shape().slot_bytes)) {}

  // How many pieces this rank's slice of a call's i-th chunk has; one at least.
  int pieces(const GpuCall &call, int64_t i) const {
    const int64_t bytes = slice_of(call, i).size * call.item();
    return static_cast<int>(std::max<int64_t>(1, (bytes + kPieceBytes - 1) / kPieceBytes));
  }

  // Adds a piece of it from all slots into slot 0, whose bytes no other rank reads or writes there.
  // `number`: the chunk's among all calls'.
  void add(const GpuCall &call, int64_t i, uint32_t number, int piece) const {
    const int64_t item = call.item();
    const Slice slice = slice_of(call, i);
    const int64_t from = slice.begin + kPieceBytes / item * piece;
    const int64_t until = std::min(slice.begin + slice.size, from + kPieceBytes / item);
    const auto function =
        table_.functions[static_cast<size_t>(call.dtype)][static_cast<size_t>(call.op)];
    Leave leave = leave_;
    if (leave == Leave::kBySize)
      leave = call.count * item <= kSourcesBytes ? Leave::kShared : Leave::kSums;
    std::vector<const void *> sources(static_cast<size_t>(world_));
    alignas(64) char sums[kBlockBytes];
    for (int64_t at = from; at < until; at += kBlockBytes / item) {
      const int64_t elements = std::min(until - at, kBlockBytes / item);
      const size_t size = static_cast<size_t>(elements * item);
      for (int r = 0; r < world_; ++r)
        sources[static_cast<size_t>(r)] = segment_.slot(0, r, number) + at * item;
      char *const target = segment_.slot(0, 0, number) + at * item;
      char *const out = leave == Leave::kMemory ? sums : target;
      function(sources.data(), world_, out, nullptr, static_cast<size_t>(elements));
      if (leave == Leave::kMemory) copy_past_caches(target, sums, size);
      if (leave == Leave::kShared)  // what others' copies are to overwrite, too
        for (const void *source : sources) hand_on(source, size);
      if (leave == Leave::kSums) hand_on(target, size);
    }
    settle();
  }

 private:
  // This rank's part of a chunk, from whole cache lines on; in elements.
  struct Slice {
    int64_t begin, size;
  };
  Slice slice_of(const GpuCall &call, int64_t i) const {
    const int64_t count = Cut(call, chunk_bytes_).size(i);
    const int64_t each = ((count + world_ - 1) / world_ + 63) / 64 * 64;
    const int64_t begin = std::min(count, each * rank_);
    return {begin, std::min(each, count - begin)};
  }

  static constexpr int64_t kPieceBytes = 64 << 10;  // what an adder takes at a time
  static constexpr int64_t kBlockBytes = 16 << 10;  // half of a core's first cache

  const Segment &segment_;
  const Table &table_;
  const int rank_, world_;
  const int64_t chunk_bytes_;
  const Leave leave_ = where_to_leave();
};

}  // namespace hfreduce
