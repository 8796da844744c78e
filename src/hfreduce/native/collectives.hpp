// The collectives of one lane: which bytes go through which slot, and who waits for whom.
//
// Every call is a number of chunks, the same on all ranks, and every rank passes every chunk in three
// steps. It *puts* what others need into its slot, it *combines* its slice of all slots, and it
// *takes* what it needs from the others' slots. Three counters a rank say how far it is. A slot is
// used again when all ranks have taken the chunk that was in it, so ranks may be as many chunks apart
// as there are slots, and the steps of different chunks overlap.
//
// In an all-reduce rank r owns slice r of each chunk: it reads that slice of its own tensor where it
// lies, adds the other ranks' from their slots, and writes the sum to its tensor and its slot, from
// which the others take it. Small tensors are put whole and combined by every rank for itself: one
// round of waiting in place of two. Both add in the order of the ranks, with the same bits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "dispatch.hpp"
#include "wait.hpp"

namespace hfreduce {

// The numbers are shared with Python's hfreduce/collectives.py.
enum class Kind : uint8_t {
  kBarrier, kAllReduce, kReduce, kBroadcast, kAllGather, kReduceScatter, kGather, kScatter
};

struct Call {
  Kind kind = Kind::kBarrier;
  Dtype dtype = Dtype::kUInt8;
  Op op = Op::kSum;
  int root = 0, rank = 0;  // rank: whose call this is
  // One element a rank where the kind has a part for each rank, one in all where it has not.
  std::vector<const char *> sources;
  std::vector<char *> targets;
  std::vector<int64_t> counts;  // in elements

  size_t item() const { return kItemBytes[static_cast<size_t>(dtype)]; }
  bool has_parts() const {
    return kind == Kind::kAllGather || kind == Kind::kReduceScatter || kind == Kind::kGather ||
           kind == Kind::kScatter;
  }
};

struct Tuning {
  size_t chunk_bytes = 0;   // of a slot, at most
  size_t direct_bytes = 0;  // up to which every rank combines a whole all-reduce
};

class Lane {
 public:
  Lane(const Segment &segment, const Waiter &waiter, const Table &table, const Tuning &tuning,
       int lane, int rank)
      : segment_(segment), waiter_(waiter), table_(table), tuning_(tuning), lane_(lane),
        rank_(rank), world_(segment.shape().world) {}

  Status run(const Call &call) {
    Status status;
    switch (call.kind) {
      case Kind::kBarrier: status = barrier(call); break;
      case Kind::kAllReduce: status = all_reduce(call); break;
      case Kind::kReduce: status = reduce(call); break;
      case Kind::kBroadcast: status = broadcast(call); break;
      case Kind::kAllGather: status = gather(call, true); break;
      case Kind::kGather: status = gather(call, rank_ == call.root); break;
      case Kind::kScatter: status = scatter(call); break;
      case Kind::kReduceScatter: status = reduce_scatter(call); break;
    }
    return status;
  }

  // The stamp of the rank that called something else, when a status says so.
  const Stamp &mismatch() const { return mismatch_; }

 private:
  // ---- the steps ----

  // Steps: put(i), combine(i) and take(i) for chunk i of this call. `combines`: whether a chunk has
  // slices to wait for. `awaits[r]`: whether take or combine reads rank r's slot.
  template <class Put, class Combine, class Take>
  Status pipeline(const Call &call, int64_t chunks, bool combines, Put put, Combine combine,
                  Take take) {
    const Stamp stamp = stamp_of(call, chunks);
    const int64_t last = combines ? 2 : 1;  // how many chunks `take` is behind `put`
    for (int64_t step = 0; step < chunks + last; ++step) {
      if (step < chunks) {
        const uint32_t chunk = next_ + static_cast<uint32_t>(step);
        const uint32_t freed = chunk + 1 - static_cast<uint32_t>(segment_.shape().slots);
        for (int r = 0; r < world_; ++r)
          if (Status s = wait(r, &Progress::taken, freed); !s) return s;
        segment_.stamp(lane_, rank_, chunk) = stamp;
        put(step, segment_.slot(lane_, rank_, chunk));
        advance(mine().put, chunk + 1);
      }
      if (const int64_t i = step - 1; combines && i >= 0 && i < chunks) {
        const uint32_t chunk = next_ + static_cast<uint32_t>(i);
        for (int r = 0; r < world_; ++r)
          if (Status s = wait_put(r, chunk, i, stamp); !s) return s;
        combine(i, chunk);
        advance(mine().combined, chunk + 1);
      }
      if (const int64_t i = step - last; i >= 0) {
        const uint32_t chunk = next_ + static_cast<uint32_t>(i);
        if (Status s = take(i, chunk, stamp); !s) return s;
        if (!combines) mine().combined.value.store(chunk + 1, std::memory_order_release);
        advance(mine().taken, chunk + 1);
      }
    }
    next_ += static_cast<uint32_t>(chunks);
    return {};
  }

  Progress &mine() const { return segment_.progress(lane_, rank_); }

  Status wait(int rank, Word Progress::*step, uint32_t target) const {
    Word &word = segment_.progress(lane_, rank).*step;
    return reached(word, target) ? Status{} : waiter_.until(word, target, rank);
  }

  Status wait_put(int rank, uint32_t chunk, int64_t index, const Stamp &stamp) {
    if (rank == rank_) return {};
    if (Status s = wait(rank, &Progress::put, chunk + 1); !s) return s;
    if (index == 0 && segment_.stamp(lane_, rank, chunk).digest != stamp.digest) {
      mismatch_ = segment_.stamp(lane_, rank, chunk);
      return waiter_.broken({Reason::kMismatch, rank});
    }
    return {};
  }

  Stamp stamp_of(const Call &call, int64_t chunks) const {
    Stamp stamp{};
    int64_t total = 0;
    uint64_t digest = 14695981039346656037u;  // FNV-1a
    const auto mix = [&](uint64_t value) {
      for (int i = 0; i < 8; ++i, value >>= 8) digest = (digest ^ (value & 0xff)) * 1099511628211u;
    };
    for (const int64_t count : call.counts) {
      mix(static_cast<uint64_t>(count));
      total += count;
    }
    mix(static_cast<uint64_t>(chunks));
    mix(static_cast<uint64_t>(call.root) << 32 | static_cast<uint64_t>(call.kind) << 16 |
        static_cast<uint64_t>(call.dtype) << 8 | static_cast<uint64_t>(call.op));
    stamp.digest = digest;
    stamp.count = total;
    stamp.root = call.root;
    stamp.kind = static_cast<uint8_t>(call.kind);
    stamp.dtype = static_cast<uint8_t>(call.dtype);
    stamp.op = static_cast<uint8_t>(call.op);
    return stamp;
  }

  // ---- chunks and slices ----

  struct Range {
    int64_t begin, size;
  };
  static int64_t divide_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit; }
  // At least one chunk: even an empty tensor makes the ranks meet.
  static int64_t chunks_of(int64_t count, int64_t each) {
    return std::max<int64_t>(1, divide_up(count, each));
  }
  static Range part(int64_t count, int64_t each, int64_t i) {
    const int64_t begin = std::min(count, each * i);
    return {begin, std::min(each, count - begin)};
  }
  // Slices start at whole cache lines and vectors.
  Range slice(int64_t count, int rank) const {
    return part(count, divide_up(divide_up(count, world_), 64) * 64, rank);
  }

  void combine_into(const Call &call, const std::vector<const void *> &sources, char *out,
                    char *copy, int64_t count) const {
    table_.functions[static_cast<size_t>(call.dtype)][static_cast<size_t>(call.op)](
        sources.data(), world_, out, copy, static_cast<size_t>(count));
  }

  // ---- the collectives ----

  Status barrier(const Call &call) {
    return pipeline(
        call, 1, false, [](int64_t, char *) {}, [](int64_t, uint32_t) {},
        [&](int64_t i, uint32_t chunk, const Stamp &stamp) -> Status {
          for (int r = 0; r < world_; ++r)
            if (Status s = wait_put(r, chunk, i, stamp); !s) return s;
          return {};
        });
  }

  Status all_reduce(const Call &call) {
    const int64_t item = static_cast<int64_t>(call.item()), count = call.counts[0];
    if (count * item <= static_cast<int64_t>(tuning_.direct_bytes)) return all_reduce_direct(call);
    return by_slices(
        call, call.targets[0],
        [&](int64_t at, int64_t size, const char *from) {
          std::memcpy(call.targets[0] + at * item, from, static_cast<size_t>(size * item));
        });
  }

  Status reduce(const Call &call) {
    const int64_t item = static_cast<int64_t>(call.item());
    char *const target = rank_ == call.root ? call.targets[0] : nullptr;
    return by_slices(call, target, [&](int64_t at, int64_t size, const char *from) {
      if (target) std::memcpy(target + at * item, from, static_cast<size_t>(size * item));
    });
  }

  Status all_reduce_direct(const Call &call) {
    const size_t item = call.item();
    const int64_t count = call.counts[0];
    std::vector<const void *> sources(world_);
    return pipeline(
        call, 1, false,
        [&](int64_t, char *slot) {
          if (count) std::memcpy(slot, call.sources[0], static_cast<size_t>(count) * item);
        },
        [](int64_t, uint32_t) {},
        [&](int64_t i, uint32_t chunk, const Stamp &stamp) -> Status {
          for (int r = 0; r < world_; ++r) {
            if (Status s = wait_put(r, chunk, i, stamp); !s) return s;
            sources[r] = r == rank_ ? call.sources[0] : segment_.slot(lane_, r, chunk);
          }
          if (count) combine_into(call, sources, call.targets[0], nullptr, count);
          return {};
        });
  }

  // `target`: where this rank's own slices go, or null. take(at, size, from): another rank's.
  template <class Take>
  Status by_slices(const Call &call, char *target, Take take) {
    const int64_t item = static_cast<int64_t>(call.item()), count = call.counts[0];
    const int64_t each = static_cast<int64_t>(tuning_.chunk_bytes) / item;
    std::vector<const void *> sources(world_);
    return pipeline(
        call, chunks_of(count, each), true,
        [&](int64_t i, char *slot) {
          const Range chunk = part(count, each, i), own = slice(chunk.size, rank_);
          if (!chunk.size) return;
          const char *from = call.sources[0] + chunk.begin * item;
          const int64_t after = own.begin + own.size;
          std::memcpy(slot, from, static_cast<size_t>(own.begin * item));
          std::memcpy(slot + after * item, from + after * item,
                      static_cast<size_t>((chunk.size - after) * item));
        },
        [&](int64_t i, uint32_t chunk) {
          const Range range = part(count, each, i), own = slice(range.size, rank_);
          if (!own.size) return;
          for (int r = 0; r < world_; ++r)
            sources[r] = (r == rank_ ? call.sources[0] + range.begin * item
                                     : segment_.slot(lane_, r, chunk)) +
                         own.begin * item;
          char *const shared = segment_.slot(lane_, rank_, chunk) + own.begin * item;
          char *const kept = target ? target + (range.begin + own.begin) * item : nullptr;
          combine_into(call, sources, kept ? kept : shared, kept ? shared : nullptr, own.size);
        },
        [&](int64_t i, uint32_t chunk, const Stamp &) -> Status {
          const Range range = part(count, each, i);
          for (int step = 1; step < world_; ++step) {
            const int r = (rank_ + step) % world_;
            if (Status s = wait(r, &Progress::combined, chunk + 1); !s) return s;
            const Range theirs = slice(range.size, r);
            if (theirs.size)
              take(range.begin + theirs.begin, theirs.size,
                   segment_.slot(lane_, r, chunk) + theirs.begin * item);
          }
          return {};
        });
  }

  Status broadcast(const Call &call) {
    const int64_t item = static_cast<int64_t>(call.item()), count = call.counts[0];
    const int64_t each = static_cast<int64_t>(tuning_.chunk_bytes) / item;
    return pipeline(
        call, chunks_of(count, each), false,
        [&](int64_t i, char *slot) {
          const Range range = part(count, each, i);
          if (rank_ == call.root && range.size)
            std::memcpy(slot, call.sources[0] + range.begin * item,
                        static_cast<size_t>(range.size * item));
        },
        [](int64_t, uint32_t) {},
        [&](int64_t i, uint32_t chunk, const Stamp &stamp) -> Status {
          if (rank_ == call.root) return {};
          if (Status s = wait_put(call.root, chunk, i, stamp); !s) return s;
          const Range range = part(count, each, i);
          if (range.size)
            std::memcpy(call.targets[0] + range.begin * item,
                        segment_.slot(lane_, call.root, chunk),
                        static_cast<size_t>(range.size * item));
          return {};
        });
  }

  // Everyone's part goes to all ranks or to one of them.
  Status gather(const Call &call, bool receives) {
    const int64_t item = static_cast<int64_t>(call.item());
    const int64_t each = static_cast<int64_t>(tuning_.chunk_bytes) / item;
    const int64_t most = *std::max_element(call.counts.begin(), call.counts.end());
    if (receives && call.counts[rank_] && call.targets[rank_] != call.sources[0])
      std::memcpy(call.targets[rank_], call.sources[0],
                  static_cast<size_t>(call.counts[rank_] * item));
    return pipeline(
        call, chunks_of(most, each), false,
        [&](int64_t i, char *slot) {
          const Range range = part(call.counts[rank_], each, i);
          if (range.size)
            std::memcpy(slot, call.sources[0] + range.begin * item,
                        static_cast<size_t>(range.size * item));
        },
        [](int64_t, uint32_t) {},
        [&](int64_t i, uint32_t chunk, const Stamp &stamp) -> Status {
          for (int step = 1; receives && step < world_; ++step) {
            const int r = (rank_ + step) % world_;
            if (Status s = wait_put(r, chunk, i, stamp); !s) return s;
            const Range range = part(call.counts[r], each, i);
            if (range.size)
              std::memcpy(call.targets[r] + range.begin * item, segment_.slot(lane_, r, chunk),
                          static_cast<size_t>(range.size * item));
          }
          return {};
        });
  }

  // The parts of one chunk lie side by side in a slot, one for each rank.
  int64_t share() const {
    return std::max<int64_t>(64, static_cast<int64_t>(tuning_.chunk_bytes) / world_ / 64 * 64);
  }

  Status scatter(const Call &call) {
    const int64_t item = static_cast<int64_t>(call.item()), each = share() / item;
    const int64_t most = *std::max_element(call.counts.begin(), call.counts.end());
    const bool sends = rank_ == call.root;
    if (sends && call.counts[rank_] && call.targets[0] != call.sources[rank_])
      std::memcpy(call.targets[0], call.sources[rank_],
                  static_cast<size_t>(call.counts[rank_] * item));
    return pipeline(
        call, chunks_of(most, each), false,
        [&](int64_t i, char *slot) {
          for (int r = 0; sends && r < world_; ++r) {
            const Range range = part(call.counts[r], each, i);
            if (r != rank_ && range.size)
              std::memcpy(slot + r * each * item, call.sources[r] + range.begin * item,
                          static_cast<size_t>(range.size * item));
          }
        },
        [](int64_t, uint32_t) {},
        [&](int64_t i, uint32_t chunk, const Stamp &stamp) -> Status {
          if (sends) return {};
          if (Status s = wait_put(call.root, chunk, i, stamp); !s) return s;
          const Range range = part(call.counts[rank_], each, i);
          if (range.size)
            std::memcpy(call.targets[0] + range.begin * item,
                        segment_.slot(lane_, call.root, chunk) + rank_ * each * item,
                        static_cast<size_t>(range.size * item));
          return {};
        });
  }

  Status reduce_scatter(const Call &call) {
    const int64_t item = static_cast<int64_t>(call.item()), each = share() / item;
    const int64_t most = *std::max_element(call.counts.begin(), call.counts.end());
    std::vector<const void *> sources(world_);
    return pipeline(
        call, chunks_of(most, each), false,
        [&](int64_t i, char *slot) {
          for (int r = 0; r < world_; ++r) {
            const Range range = part(call.counts[r], each, i);
            if (r != rank_ && range.size)
              std::memcpy(slot + r * each * item, call.sources[r] + range.begin * item,
                          static_cast<size_t>(range.size * item));
          }
        },
        [](int64_t, uint32_t) {},
        [&](int64_t i, uint32_t chunk, const Stamp &stamp) -> Status {
          const Range range = part(call.counts[rank_], each, i);
          for (int r = 0; r < world_; ++r) {
            if (Status s = wait_put(r, chunk, i, stamp); !s) return s;
            sources[r] = r == rank_ ? call.sources[rank_] + range.begin * item
                                    : segment_.slot(lane_, r, chunk) + rank_ * each * item;
          }
          if (range.size)
            combine_into(call, sources, call.targets[0] + range.begin * item, nullptr, range.size);
          return {};
        });
  }

  const Segment &segment_;
  const Waiter &waiter_;
  const Table &table_;
  const Tuning &tuning_;
  const int lane_, rank_, world_;
  uint32_t next_ = 0;  // the number of the next chunk, the same on all ranks
  Stamp mismatch_{};
};

}  // namespace hfreduce
