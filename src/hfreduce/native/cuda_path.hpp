// All-reduces of tensors on a GPU: copy engines move, this process's threads add.
//
// Two streams: `out` copies a chunk of the tensor into this rank's slot and says so by writing a word,
// `back` waits for a word, copies the sum from slot 0 into the tensor and writes another. All chunks
// are enqueued in one call, and a thread of the host, the server, sees them through: of all calls, as
// one row of chunks, so that a call's first chunks go out while the one before is still on its way
// back. The GPU reads and writes words of this process alone:
//
//   allow    the host says: slots are free up to this chunk       (`out` waits for it)
//   arrived  `out` says: copied up to this chunk
//   go       the host says: the sums up to this chunk are whole   (`back` waits for it)
//   returned `back` says: copied up to this chunk
//
// and the host relays them to the counters that ranks share. So whatever another rank does, this one can
// let its own streams go: when a rank dies, `allow` and `go` jump to the end of all calls, the streams
// run dry with whatever lies in the slots, and the calls have failed.
//
// For each chunk `out` is enqueued before `back`, and a wait of either depends only on what was
// enqueued before it, here and on other ranks in the same order. So nothing blocks for ever even
// where the driver maps both streams, or others, to one hardware queue.
//
// A call goes in as many chunks as keep both directions and the adders busy: about eight, of at least
// half a MiB and at most a slot. Measured on H200s, a chunk costs 9 µs beside its bytes with one rank
// and about 100 with two, which is not understood yet; sixteen chunks of 25 MiB were slower than eight.
//
// Where the driver has no such words, the host enqueues each copy when its turn has come, and asks
// events. That is correct everywhere and slower.
#pragma once

#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "adders.hpp"
#include "cuda_driver.hpp"
#include "group.hpp"
#include "past_caches.hpp"
#include "trace.hpp"

namespace hfreduce {

// Seconds in calls, and of them with something under way in each stage.
struct Busy {
  double all = 0, out = 0, adding = 0, back = 0;
};

class CudaPath {
 public:
  struct Words {
    Word allow, arrived, go, returned;
  };

  struct Call {
    CUdeviceptr tensor = 0;
    int64_t count = 0;
    Dtype dtype = Dtype::kFloat32;
    Op op = Op::kSum;
    uint32_t first = kFirst;  // the call's first chunk
  };
  static constexpr uint32_t kFirst = 1;  // the group's first meeting was chunk 0

  // How a call is cut into chunks: about eight, and where there are several, smaller ones at both
  // ends, since nothing comes back before the first is out and nothing goes out beside the last.
  struct Cut {
    Cut(const Call &call, int64_t most_bytes) : count(call.count) {
      const int64_t item = static_cast<int64_t>(kItemBytes[static_cast<size_t>(call.dtype)]);
      const int64_t share = std::max(count * item / kChunks, kLeastBytes);
      unit = (std::min(share, most_bytes) + 4 * kPageBytes - 1) / (4 * kPageBytes) * kPageBytes / item;
      if (4 * unit * item > most_bytes) unit = most_bytes / item / 4 / 64 * 64;
      ramped = count >= 12 * unit && ramps();
      inner = ramped ? (count - 3 * unit) / 64 * 64 : count;
      const int64_t before = ramped ? 3 * unit : 0;
      middle = std::max<int64_t>(1, (inner - before + 4 * unit - 1) / (4 * unit));
      chunks = ramped ? middle + 4 : middle;
    }
    // Elements before a chunk; a chunk begins at a whole cache line of any type.
    int64_t begin(int64_t i) const {
      if (!ramped) return std::min(count, 4 * unit * i);
      if (i < 2) return unit * i;
      if (i < middle + 2) return unit * (4 * i - 5);
      if (i == middle + 2) return inner;
      return i == middle + 3 ? (count - unit) / 64 * 64 : count;
    }
    int64_t size(int64_t i) const { return begin(i + 1) - begin(i); }
    static bool ramps() {
      return ramp_knob();
    }

    static bool &ramp_knob() { static bool knob = true; return knob; }
    static constexpr int64_t kLeastBytes = 512 << 10, kChunks = 8, kPageBytes = 4096;
    int64_t count, unit, inner, middle, chunks;
    bool ramped;
  };

  CudaPath(Group &group, int device, bool flags, int threads)
      : group_(group), segment_(group.segment()), driver_(CudaDriver::get()), device_(device),
        rank_(group.rank()), world_(segment_.shape().world),
        chunk_bytes_(static_cast<int64_t>(segment_.shape().slot_bytes)) {
    driver_.check(driver_.context_retain(&context_, device_), "cuDevicePrimaryCtxRetain");
    InContext current(context_);
    try {
      driver_.check(driver_.mem_host_register(segment_.base(), segment_.shape().bytes(),
                                              kHostRegisterPortable | kHostRegisterDeviceMap),
                    "cuMemHostRegister of the group's memory");
      registered_ = true;
      void *words = nullptr;
      driver_.check(driver_.mem_host_alloc(&words, sizeof(Words),
                                           kHostRegisterPortable | kHostRegisterDeviceMap),
                    "cuMemHostAlloc");
      std::memset(words, 0, sizeof(Words));
      words_ = static_cast<Words *>(words);
      driver_.check(driver_.mem_host_get_device_pointer(&words_on_device_, words, 0),
                    "cuMemHostGetDevicePointer");
      out_ = Streams::take(context_);
      back_ = Streams::take(context_);
      flags_ = flags && driver_.stream_write && driver_.stream_wait && flags_work();
      const int events = flags_ ? 0 : 2 * segment_.shape().slots;
      for (int i = 0; i < events; ++i) {
        events_.push_back(nullptr);
        driver_.check(driver_.event_create(&events_.back(), kEventDisableTiming), "cuEventCreate");
      }
      lanes_ = world_ > 1 ? std::max(1, threads) : 1;
      trace_ = std::make_unique<Trace>(lanes_);
      looks_ = group.waiter().pauses > 0 ? kLooks : 0;
      if (const char *looks = getenv("HFREDUCE_LOOKS")) looks_ = atoi(looks);
      if (const char *knob = getenv("HFREDUCE_STORE")) store_ = *knob;
      if (const char *knob = getenv("HFREDUCE_RAMP")) Cut::ramp_knob() = *knob != '0';
      if (lanes_ > 1)
        adders_ = std::make_unique<Adders>(
            lanes_, kFirst, looks_, [this](int lane, uint32_t chunk) {
              trace_->note(Stage::kAdding, chunk, lane);
              combine(chunk, lane, lanes_);
              trace_->note(Stage::kAdded, chunk, lane);
            });
      chunks_.resize(static_cast<size_t>(segment_.shape().slots));
      submitted_.value.store(kFirst);
      finished_.value.store(kFirst);
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
    } catch (...) {
      adders_.reset();
      release();
      driver_.context_release(device_);
      throw;
    }
  }

  CudaPath(const CudaPath &) = delete;
  ~CudaPath() { close(); }

  bool flags() const { return flags_; }
  Busy busy() const { return busy_; }  // between calls
  std::vector<Trace::Note> trace() const { return trace_->take(); }
  CUstream out() const { return out_; }
  CUstream back() const { return back_; }

  int64_t chunks_of(const Call &call) const { return Cut(call, chunk_bytes_).chunks; }

  // Announces a call, which the server goes on with when its turn has come. Calls are announced and
  // enqueued in one order, the same on all ranks.
  void submit(const Call &call) {
    if (!context_) throw std::runtime_error("the group is closed");
    const uint32_t end = call.first + static_cast<uint32_t>(chunks_of(call));
    {
      std::lock_guard<std::mutex> lock(mutex_);
      calls_.push_back({call, stamp_of(call), end});
      advance(submitted_, end);
      if (failed_) run_dry();
    }
    // To wake takes them as long as the first copy out.
    if (adders_ && call.count * item(call) > kAloneBytes) adders_->rouse();
  }

  // Enqueues a call that has been announced on `out` and `back`. The caller has made `out` wait for the
  // tensor. The queues may be shorter than the call.
  void enqueue(const Call &call) {
    if (!context_) throw std::runtime_error("the group is closed");
    if (!flags_) return;
    InContext current(context_);
    const Cut cut(call, chunk_bytes_);
    int whose;
    for (int64_t i = 0; i < cut.chunks; ++i) {
      const uint32_t number = call.first + static_cast<uint32_t>(i) + 1;
      // Mostly its slot is free already.
      if (ahead(number, least(&Progress::taken, whose) + slots()))
        wait_on(out_, offsetof(Words, allow), number);
      copy_out(call, cut, i);
      write_to(out_, offsetof(Words, arrived), number);
      wait_on(back_, offsetof(Words, go), number);
      copy_back(call, cut, i);
      write_to(back_, offsetof(Words, returned), number);
    }
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
    if (!context_) return;
    if (getpid() != process_) {  // CUDA did not survive the fork
      context_ = nullptr;
      (void)adders_.release();
      (void)server_.release();
      return;
    }
    ending_.store(true);
    wake_all(submitted_);
    server_->join();
    server_.reset();
    adders_.reset();
    // Nothing throws here: what a broken context still holds goes with the process.
    CUcontext popped;
    if (driver_.context_push(context_) == kCudaSuccess) {
      driver_.stream_synchronize(out_);
      driver_.stream_synchronize(back_);
      release();
      driver_.context_pop(&popped);
    }
    context_ = nullptr;
    driver_.context_release(device_);
  }

 private:
  using Clock = std::chrono::steady_clock;

  int64_t item(const Call &call) const {
    return static_cast<int64_t>(kItemBytes[static_cast<size_t>(call.dtype)]);
  }
  void copy_out(const Call &call, const Cut &cut, int64_t i) {
    const uint32_t chunk = call.first + static_cast<uint32_t>(i);
    if (const int64_t size = cut.size(i) * item(call))
      driver_.check(driver_.copy_to_host(segment_.slot(0, rank_, chunk), tensor_at(call, cut, i),
                                         static_cast<size_t>(size), out_),
                    "cuMemcpyDtoHAsync");
  }
  void copy_back(const Call &call, const Cut &cut, int64_t i) {
    const uint32_t chunk = call.first + static_cast<uint32_t>(i);
    if (const int64_t size = cut.size(i) * item(call))
      driver_.check(driver_.copy_to_device(tensor_at(call, cut, i), segment_.slot(0, 0, chunk),
                                           static_cast<size_t>(size), back_),
                    "cuMemcpyHtoDAsync");
  }
  CUdeviceptr tensor_at(const Call &call, const Cut &cut, int64_t i) const {
    return call.tensor + static_cast<uint64_t>(cut.begin(i) * item(call));
  }

  void wait_on(CUstream stream, size_t offset, uint32_t value) {
    driver_.check(driver_.stream_wait(stream, words_on_device_ + offset, value, kWaitGreaterOrEqual),
                  "cuStreamWaitValue32");
  }
  void write_to(CUstream stream, size_t offset, uint32_t value) {
    driver_.check(driver_.stream_write(stream, words_on_device_ + offset, value, kWriteDefault),
                  "cuStreamWriteValue32");
  }

  // A value goes to the device and back, once.
  bool flags_work() {
    words_->allow.value.store(0);
    const CUresult waits =
        driver_.stream_wait(out_, words_on_device_ + offsetof(Words, allow), 0, kWaitGreaterOrEqual);
    const CUresult writes =
        driver_.stream_write(out_, words_on_device_ + offsetof(Words, arrived), 1, kWriteDefault);
    if (waits != kCudaSuccess || writes != kCudaSuccess) return false;
    driver_.check(driver_.stream_synchronize(out_), "cuStreamSynchronize");
    const bool came = words_->arrived.value.load() == 1;
    words_->arrived.value.store(0);
    return came;
  }

  uint32_t slots() const { return static_cast<uint32_t>(segment_.shape().slots); }
  static bool ahead(uint32_t a, uint32_t b) { return static_cast<int32_t>(a - b) > 0; }

  // The least of a counter over all ranks, and whose it is.
  uint32_t least(Word Progress::*step, int &whose) const {
    uint32_t found = (segment_.progress(0, 0).*step).value.load(std::memory_order_acquire);
    whose = 0;
    for (int r = 1; r < world_; ++r) {
      const uint32_t value = (segment_.progress(0, r).*step).value.load(std::memory_order_acquire);
      if (ahead(found, value)) found = value, whose = r;
    }
    return found;
  }

  // The server: sees all calls through until the group breaks or closes.
  void serve() {
    prctl(PR_SET_TIMERSLACK, 1000ul);  // a sleep of 10 µs would else take 60: the system rounds up
    Status status;
    try {
      std::unique_ptr<InContext> current;
      if (!flags_) current = std::make_unique<InContext>(context_);
      while (status && has_work()) {
        status = group_.usable();
        if (status) status = progress();
      }
    } catch (const std::exception &) {
      status = group_.waiter().broken({Reason::kInterrupted, rank_});
    }
    if (adders_) adders_->rest();
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
      while (allowed_ != end && !ahead(allowed_ + 1 - slots(), least(&Progress::taken, blamed))) {
        const Chunk &chunk = take_up(allowed_);
        segment_.stamp(0, rank_, allowed_) = chunk.stamp;
        ++allowed_;
        trace_->note(Stage::kAllowed, allowed_ - 1);
        if (flags_) {
          words_->allow.value.store(allowed_, std::memory_order_release);
        } else {
          copy_out(chunk.call, Cut(chunk.call, chunk_bytes_), chunk.index);
          driver_.check(driver_.event_record(event(allowed_ - 1, false), out_), "cuEventRecord");
        }
        moved = true;
        // Again: calls may be announced long before their turn.
        if (adders_ && bytes_of(chunk) > kAloneBytes) adders_->rouse();
      }
      const uint32_t here = seen(arrived_, allowed_, words_->arrived, false);
      if (here != arrived_) {
        trace_->note(Stage::kArrived, arrived_, here);
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
          trace_->note(Stage::kGathered, given_, until);
          if (alone) {
            combine(given_, 0, 1);
            added_ = until;
          } else {
            adders_->arrived(given_, until);
          }
          given_ = until;
          moved = true;
        }
      }
      uint32_t added = added_;
      if (adders_ && ahead(adders_->done(), added)) added = adders_->done();
      if (added != combined_) {
        trace_->note(Stage::kCombined, combined_, added);
        combined_ = added;
        advance(mine.combined, combined_);
        moved = true;
      }
      const uint32_t summed = least(&Progress::combined, blamed);
      while (gone_ != arrived_ && ahead(summed, gone_)) {
        ++gone_;
        trace_->note(Stage::kGone, gone_ - 1);
        if (flags_) {
          words_->go.value.store(gone_, std::memory_order_release);
        } else {
          const Chunk &whole = at(gone_ - 1);
          copy_back(whole.call, Cut(whole.call, chunk_bytes_), whole.index);
          driver_.check(driver_.event_record(event(gone_ - 1, true), back_), "cuEventRecord");
        }
        moved = true;
      }
      const uint32_t there = seen(returned_, gone_, words_->returned, true);
      if (there != returned_) {
        trace_->note(Stage::kReturned, returned_, there);
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

  // A chunk that is under way; those of the last slots are kept.
  struct Chunk {
    Call call;
    Stamp stamp{};
    int64_t index = 0;  // in its call
  };
  struct Announced {
    Call call;
    Stamp stamp{};
    uint32_t end = kFirst;
  };

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

  // How far a stream is: by its word, or by the events of what was enqueued.
  uint32_t seen(uint32_t before, uint32_t enqueued, const Word &word, bool back) {
    if (flags_) return word.value.load(std::memory_order_acquire) == before
                           ? before
                           : within(before, word.value.load(std::memory_order_acquire), enqueued);
    while (before != enqueued) {
      const CUresult result = driver_.event_query(event(before, back));
      if (result == kCudaNotReady) break;
      driver_.check(result, "cuEventQuery");
      ++before;
    }
    return before;
  }
  // The word of a stream that has done nothing in this call yet still has an earlier call's value.
  static uint32_t within(uint32_t before, uint32_t value, uint32_t enqueued) {
    return ahead(value, before) && !ahead(value, enqueued) ? value : before;
  }
  CUevent event(uint32_t chunk, bool back) const {
    const size_t slots = static_cast<size_t>(segment_.shape().slots);
    return events_[(back ? slots : 0) + chunk % slots];
  }

  int64_t bytes_of(const Chunk &chunk) const {
    return Cut(chunk.call, chunk_bytes_).size(chunk.index) * item(chunk.call);
  }

  // This rank's slice of all slots goes into slot 0, whose bytes no other rank reads or writes there.
  void combine(uint32_t chunk, int lane, int lanes) const {
    const Call &call = at(chunk).call;
    if (world_ == 1) return;
    const int64_t bytes = item(call);
    const int64_t count = Cut(call, chunk_bytes_).size(at(chunk).index);
    const int64_t slice = ((count + world_ - 1) / world_ + 63) / 64 * 64;
    const int64_t begin = std::min(count, slice * rank_), size = std::min(slice, count - begin);
    const int64_t part = ((size + lanes - 1) / lanes + 63) / 64 * 64;
    const auto function = group_.table().functions[static_cast<size_t>(call.dtype)]
                                                  [static_cast<size_t>(call.op)];
    const int64_t from = begin + std::min(size, part * lane);
    const int64_t until = begin + std::min(size, part * (lane + 1));
    std::vector<const void *> sources(static_cast<size_t>(world_));
    alignas(64) char sums[kBlockBytes];
    const char store = store_;
    for (int64_t i = from; i < until; i += kBlockBytes / bytes) {
      const int64_t elements = std::min(until - i, kBlockBytes / bytes);
      for (int r = 0; r < world_; ++r)
        sources[static_cast<size_t>(r)] = segment_.slot(0, r, chunk) + i * bytes;
      char *const target = segment_.slot(0, 0, chunk) + i * bytes;
      if (store != '1') {
        function(sources.data(), world_, target, nullptr, static_cast<size_t>(elements));
#if defined(__x86_64__)
        if (store == '2')
          for (char *p = target; p < target + elements * bytes; p += 64) asm volatile("cldemote %0" ::"m"(*p));
#endif
        continue;
      }
      function(sources.data(), world_, sums, nullptr, static_cast<size_t>(elements));
      copy_past_caches(target, sums, static_cast<size_t>(elements * bytes));
    }
    settle();
  }
  static constexpr int64_t kBlockBytes = 16 << 10;  // half of a core's first cache
  static constexpr int64_t kAloneBytes = 256 << 10;

  Stamp stamp_of(const Call &call) const {
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
  // still take what an earlier call gave it: that rank gets a second.
  void fail(const Status &status) {
    int whose;
    for (int i = 0; i < 1000 && ahead(returned_, least(&Progress::taken, whose)); ++i) {
      const timespec millisecond{0, 1'000'000};
      nanosleep(&millisecond, nullptr);
    }
    std::lock_guard<std::mutex> lock(mutex_);
    failed_ = true;
    failure_ = status;
    run_dry();
    wake_all(finished_);
  }
  void run_dry() {
    words_->allow.value.store(submitted_.value.load(), std::memory_order_release);
    words_->go.value.store(submitted_.value.load(), std::memory_order_release);
  }

  // What a thread does that has found nothing to do: looks again at once, soon, later.
  class Idle {
   public:
    Idle(const Waiter &waiter, int looks) : waiter_(waiter), looks_(std::max(looks, 200)) {}
    Status step(bool moved, int blamed) {
      if (moved) {
        tries_ = 0;
        return {};
      }
      if (++tries_ < looks_) {
        cpu_pause();
        return {};
      }
      const auto now = Clock::now();
      if (tries_ == looks_) since_ = looked_ = now;
      // The GPU may be computing for long before a gradient is ready.
      const long pause = now - since_ < std::chrono::milliseconds(5) ? 10'000 : 100'000;
      const timespec request{0, pause};
      nanosleep(&request, nullptr);
      if (now - looked_ < std::chrono::milliseconds(20)) return {};
      looked_ = now;
      return waiter_.checked(blamed, since_);
    }

   private:
    const Waiter &waiter_;
    const int64_t looks_;
    int64_t tries_ = 0;
    Clock::time_point since_, looked_;
  };

  void release() {
    for (CUevent event : events_)
      if (event) driver_.event_destroy(event);
    events_.clear();
    Streams::give(context_, out_);
    Streams::give(context_, back_);
    if (words_) driver_.mem_free_host(words_);
    if (registered_) driver_.mem_host_unregister(segment_.base());
    out_ = back_ = nullptr;
    words_ = nullptr;
    registered_ = false;
  }

  Group &group_;
  const Segment &segment_;
  const CudaDriver &driver_;
  const CUdevice device_;
  const int rank_, world_;
  const int64_t chunk_bytes_;
  const int process_ = getpid();
  // Some 200 µs of looking, where there are processors to spare: the next chunk is that near. Looking
  // four times as long went with slower calls on two H200s.
  static constexpr int kLooks = 4000;
  int lanes_ = 1, looks_ = 0;
  char store_ = '1';
  bool flags_ = false, registered_ = false;
  CUcontext context_ = nullptr;
  Words *words_ = nullptr;
  CUdeviceptr words_on_device_ = 0;
  CUstream out_ = nullptr, back_ = nullptr;
  std::vector<CUevent> events_;
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
  std::unique_ptr<Trace> trace_;
};

}  // namespace hfreduce
