// All-reduces of tensors on a GPU: copy engines move, this process's threads add.
//
// All copies of a call are enqueued at once on two streams (gpu_streams.hpp), and a thread of the
// host, the server, sees them through: of all calls, as one row of chunks (gpu_call.hpp), so that a
// call's first chunks go out while the one before is still on its way back.
//
// The GPU reads and writes words of this process alone, and the server relays them to the counters
// that ranks share. So whatever another rank does, this one can let its own streams go: when a rank
// dies, `allow` and `go` jump to the end of all calls, the streams run dry with whatever lies in the
// slots, and the calls have failed.
#pragma once

#include <sys/prctl.h>

#include <chrono>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "adders.hpp"
#include "gpu_streams.hpp"
#include "gpu_sums.hpp"
#include "group.hpp"
#include "idle.hpp"
#include "trace.hpp"

namespace hfreduce {

// Seconds in calls, and of them with something under way in each stage.
struct Busy {
  double all = 0, out = 0, adding = 0, back = 0;
};

class CudaPath {
 public:
  static constexpr uint32_t kFirst = 1;  // the group's first meeting was chunk 0

  CudaPath(Group &group, int device, bool flags, int threads)
      : group_(group), segment_(group.segment()), rank_(group.rank()),
        world_(segment_.shape().world),
        chunk_bytes_(static_cast<int64_t>(segment_.shape().slot_bytes)),
        sums_(segment_, group.table(), rank_), streams_(segment_, rank_, device, flags),
        looks_(group.waiter().pauses > 0 ? kLooks : 0), trace_(threads) {
    chunks_.resize(static_cast<size_t>(segment_.shape().slots));
    submitted_.value.store(kFirst);
    finished_.value.store(kFirst);
    if (world_ > 1 && threads > 1)
      adders_ = std::make_unique<Adders>(
          threads, kFirst, segment_.shape().slots, looks_,
          [this](int thread, uint32_t chunk, int piece) { combine(thread, at(chunk), chunk, piece); });
    sigset_t all, before;  // signals go to Python's main thread
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      server_ = std::make_unique<std::thread>([this] { serve(); });
    } catch (...) {
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  CudaPath(const CudaPath &) = delete;
  ~CudaPath() { close(); }

  bool flags() const { return streams_.by_words(); }
  Busy busy() const { return busy_; }  // between calls
  std::vector<Trace::Note> trace() { return trace_.take(); }
  CUstream out() const { return streams_.out(); }
  CUstream back() const { return streams_.back(); }

  int64_t chunks_of(const GpuCall &call) const { return Cut(call, chunk_bytes_).chunks(); }

  // Announces a call, which the server goes on with when its turn has come. Calls are announced and
  // enqueued in one order, the same on all ranks.
  void submit(const GpuCall &call) {
    check_open();
    const uint32_t end = call.first + static_cast<uint32_t>(chunks_of(call));
    {
      std::lock_guard<std::mutex> lock(mutex_);
      calls_.push_back({call, stamp_of(call), end});
      advance(submitted_, end);
      if (failed_) streams_.let_go(end);
    }
    // To wake takes them as long as the first copy out.
    if (adders_ && call.count * call.item() > kAloneBytes) adders_->rouse();
  }

  // Enqueues a call that has been announced. The caller has made `out` wait for the tensor.
  void enqueue(const GpuCall &call) {
    check_open();
    streams_.enqueue(call);
  }

  // Returns when the chunks before `end` are back in their tensors, or with why they will not be.
  Status wait(uint32_t end) {
    if (getpid() != process_) return {Reason::kForked, rank_};
    for (int looks = 0; !reached(finished_, end); ++looks) {
      const uint32_t seen = finished_.value.load(std::memory_order_seq_cst);
      {
        std::lock_guard<std::mutex> lock(mutex_);
        if (failed_ && !reached(finished_, end)) return failure_;
      }
      if (looks < 20) {
        sched_yield();
        continue;
      }
      finished_.waiters.fetch_add(1, std::memory_order_seq_cst);
      if (!reached(finished_, end)) sleep_on(finished_, seen, 50'000'000);
      finished_.waiters.fetch_sub(1, std::memory_order_seq_cst);
    }
    return {};
  }

  void close() {
    if (!server_) return;
    if (getpid() != process_) {  // neither threads nor CUDA survived the fork
      (void)adders_.release();
      (void)server_.release();
      streams_.disown();
      return;
    }
    ending_.store(true);
    wake_all(submitted_);
    server_->join();
    server_.reset();
    adders_.reset();
    streams_.close();
  }

 private:
  using Clock = std::chrono::steady_clock;

  // A chunk that is under way; those of the last slots are kept.
  struct Chunk {
    GpuCall call;
    Stamp stamp{};
    int64_t index = 0;  // in its call
  };
  struct Announced {
    GpuCall call;
    Stamp stamp{};
    uint32_t end = kFirst;
  };

  void check_open() const {
    if (!server_ || getpid() != process_) throw std::runtime_error("the group is closed");
  }

  uint32_t least(Word Progress::*step, int &whose) const {
    const Segment::Least found = segment_.least(step);
    whose = found.rank;
    return found.value;
  }

  // The server: sees all calls through until the group breaks or closes.
  void serve() {
    prctl(PR_SET_TIMERSLACK, 1000ul);  // a sleep of 10 µs would else take 60: the system rounds up
    Status status;
    try {
      const auto current = streams_.for_events();
      while (status && has_work()) {
        status = group_.usable();
        if (status) status = progress();
      }
    } catch (const std::exception &) {
      status = group_.waiter().broken({Reason::kInterrupted, rank_});
    }
    while (adders_ && added_up() != given_) sched_yield();
    if (!status) fail(status);
  }

  // Waits for a call; false at the end.
  bool has_work() {
    for (int looks = 0; submitted_.value.load(std::memory_order_acquire) == returned_; ++looks) {
      if (ending_.load()) return false;
      if (looks < looks_) {
        cpu_pause();
        continue;
      }
      submitted_.waiters.fetch_add(1, std::memory_order_seq_cst);
      if (submitted_.value.load(std::memory_order_seq_cst) == returned_ && !ending_.load())
        sleep_on(submitted_, returned_, 500'000'000);
      submitted_.waiters.fetch_sub(1, std::memory_order_seq_cst);
    }
    return true;
  }

  // Sees chunks through until there is none left.
  Status progress() {
    Progress &mine = segment_.progress(0, rank_);
    const uint32_t slots = static_cast<uint32_t>(segment_.shape().slots);
    int blamed = rank_;
    Idle idle(group_.waiter(), looks_);
    auto before = Clock::now();
    for (;;) {
      const uint32_t end = submitted_.value.load(std::memory_order_acquire);
      if (returned_ == end) return {};
      bool moved = false;
      const auto now = Clock::now();
      const double seconds = std::chrono::duration<double>(now - before).count();
      before = now;
      busy_.all += seconds;
      if (arrived_ != allowed_) busy_.out += seconds;
      if (combined_ != given_) busy_.adding += seconds;
      if (returned_ != gone_) busy_.back += seconds;
      while (allowed_ != end && !ahead(allowed_ + 1 - slots, least(&Progress::taken, blamed))) {
        const Chunk &chunk = take_up(allowed_);
        segment_.stamp(0, rank_, allowed_) = chunk.stamp;
        ++allowed_;
        streams_.let_out(chunk.call, chunk.index);
        trace_.note(Stage::kAllowed, allowed_ - 1);
        moved = true;
        // Again: calls may be announced long before their turn.
        if (adders_ && bytes_of(chunk) > kAloneBytes) adders_->rouse();
      }
      const uint32_t here = streams_.arrived(arrived_, allowed_);
      if (here != arrived_) {
        trace_.note(Stage::kArrived, arrived_, here);
        arrived_ = here;
        advance(mine.put, arrived_);
        moved = true;
      }
      if (given_ != arrived_) {
        const uint32_t put = least(&Progress::put, blamed);
        if (ahead(put, given_)) {
          // To wake adders takes longer than to add a few KiB. This thread adds one chunk at a time,
          // so that the streams are fed in between.
          const bool alone = !adders_ || (combined_ == given_ && bytes_of(at(given_)) <= kAloneBytes);
          const uint32_t whole = ahead(put, arrived_) ? arrived_ : put;
          const uint32_t until = alone ? given_ + 1 : whole;
          for (uint32_t i = given_; i != until; ++i)
            if (at(i).index == 0)
              if (Status s = agreed(i, at(i).stamp); !s) return s;
          trace_.note(Stage::kGathered, given_, until);
          if (alone && world_ > 1)
            for (int piece = 0; piece < pieces_of(at(given_)); ++piece)
              combine(kServer, at(given_), given_, piece);
          if (alone) added_ = until;
          for (; given_ != until; ++given_)
            if (!alone) adders_->arrived(given_, pieces_of(at(given_)));
          moved = true;
        }
      }
      if (const uint32_t before_adding = combined_; added_up() != before_adding) {
        trace_.note(Stage::kCombined, before_adding, combined_);
        advance(mine.combined, combined_);
        moved = true;
      }
      const uint32_t summed = least(&Progress::combined, blamed);
      while (gone_ != arrived_ && ahead(summed, gone_)) {
        ++gone_;
        trace_.note(Stage::kGone, gone_ - 1);
        const Chunk &whole = at(gone_ - 1);
        streams_.let_back(whole.call, whole.index);
        moved = true;
      }
      const uint32_t there = streams_.returned(returned_, gone_);
      if (there != returned_) {
        // Once the group has failed others copy over slots: what came back may be theirs.
        if (const uint64_t failure = segment_.header().failure.load())
          return Status::unpacked(failure);
        trace_.note(Stage::kReturned, returned_, there);
        returned_ = there;
        advance(mine.taken, returned_);
        advance(finished_, returned_);
        moved = true;
      }
      // Whom this rank waits for: its own GPU, or the rank behind in the step that comes next.
      if (!moved) {
        if (arrived_ != allowed_ || returned_ != gone_ || combined_ != given_)
          blamed = rank_;
        else if (given_ != arrived_)
          least(&Progress::put, blamed);
        else if (gone_ != combined_)
          least(&Progress::combined, blamed);
        else
          least(&Progress::taken, blamed);
      }
      if (Status s = idle.step(moved, blamed); !s) return s;
    }
  }

  const Chunk &at(uint32_t chunk) const { return chunks_[chunk % chunks_.size()]; }
  const Chunk &take_up(uint32_t chunk) {
    if (chunk == current_.end) {
      std::lock_guard<std::mutex> lock(mutex_);
      current_ = calls_.front();
      calls_.pop_front();
    }
    Chunk &kept = chunks_[chunk % chunks_.size()];
    kept = {current_.call, current_.stamp, static_cast<int64_t>(chunk - current_.call.first)};
    return kept;
  }

  int64_t bytes_of(const Chunk &chunk) const {
    return Cut(chunk.call, chunk_bytes_).size(chunk.index) * chunk.call.item();
  }
  int pieces_of(const Chunk &chunk) const { return sums_.pieces(chunk.call, chunk.index); }

  void combine(int thread, const Chunk &chunk, uint32_t number, int piece) {
    trace_.note(Stage::kAdding, number, thread);
    sums_.add(chunk.call, chunk.index, number, piece);
    trace_.note(Stage::kAdded, number, thread);
  }

  // Up to which chunk this rank's slices are added.
  uint32_t added_up() {
    while (combined_ != given_ &&
           (ahead(added_, combined_) ||
            (adders_ && adders_->done(combined_) == pieces_of(at(combined_)))))
      ++combined_;
    return combined_;
  }

  Stamp stamp_of(const GpuCall &call) const {
    Stamp stamp{};
    stamp.count = call.count;
    stamp.kind = static_cast<uint8_t>(Kind::kAllReduce);
    stamp.dtype = static_cast<uint8_t>(call.dtype);
    stamp.op = static_cast<uint8_t>(call.op);
    stamp.digest = static_cast<uint64_t>(call.count) * 31 + stamp.dtype * 7u + stamp.op;
    return stamp;
  }
  Status agreed(uint32_t chunk, const Stamp &stamp) {
    for (int r = 0; r < world_; ++r)
      if (segment_.stamp(0, r, chunk).digest != stamp.digest) {
        group_.set_mismatch(segment_.stamp(0, r, chunk));
        return group_.waiter().broken({Reason::kMismatch, r});
      }
    return {};
  }

  // Ends all calls, those to come too. The streams then copy over slots from which a slower rank may
  // still take what an earlier call gave it: that rank gets a second to see the call end well, unless
  // it is to blame, has failed or is gone.
  void fail(const Status &status) {
    segment_.member(rank_).state.store(State::kFailed);  // it takes no more from others' slots
    for (int i = 0; i < 1000 && someone_is_behind(status.rank); ++i) {
      const timespec millisecond{0, 1'000'000};
      nanosleep(&millisecond, nullptr);
    }
    std::lock_guard<std::mutex> lock(mutex_);
    failed_ = true;
    failure_ = status;
    streams_.let_go(submitted_.value.load());
    wake_all(finished_);
  }

  bool someone_is_behind(int blamed) const {
    for (int r = 0; r < world_; ++r)
      if (r != blamed &&
          ahead(returned_, segment_.progress(0, r).taken.value.load(std::memory_order_acquire)) &&
          segment_.member(r).state.load() == State::kAttached && !group_.waiter().peers->is_dead(r))
        return true;
    return false;
  }

  // Some 200 µs of looking, where there are processors to spare: the next chunk is that near.
  static constexpr int kLooks = 4000;
  // A chunk that the server adds itself, where nothing else is being added.
  static constexpr int64_t kAloneBytes = 256 << 10;
  static constexpr int kServer = -1;                // in the trace

  Group &group_;
  const Segment &segment_;
  const int rank_, world_;
  const int64_t chunk_bytes_;
  const int process_ = getpid();
  const GpuSums sums_;
  GpuStreams streams_;
  const int looks_;
  Trace trace_;
  Busy busy_;
  // The server's: up to which chunk each step has come.
  uint32_t allowed_ = kFirst, arrived_ = kFirst, given_ = kFirst, added_ = kFirst, combined_ = kFirst,
           gone_ = kFirst, returned_ = kFirst;
  Announced current_;  // whose chunks are allowed
  std::vector<Chunk> chunks_;
  // Between the server and others.
  std::mutex mutex_;
  std::deque<Announced> calls_;
  bool failed_ = false;
  Status failure_;
  Word submitted_{}, finished_{};
  std::atomic<bool> ending_{false};
  std::unique_ptr<std::thread> server_;
  std::unique_ptr<Adders> adders_;
};

}  // namespace hfreduce
