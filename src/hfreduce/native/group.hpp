// One rank's view of a group: the segment, the peers' processes and the lanes.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "collectives.hpp"
#include "lanes.hpp"

namespace hfreduce {

struct Options {
  int rank = 0;
  Shape shape;
  Tuning tuning;
  std::string instructions;
  int pauses = 0, yields = 0;
};

class Group {
 public:
  Group(Segment &&segment, const Options &options)
      : segment_(std::move(segment)), options_(options), process_(getpid()),
        table_(table_of(options.instructions)) {
    waiter_.segment = &segment_;
    waiter_.peers = &peers_;
    waiter_.self = options_.rank;
    waiter_.pauses = options_.pauses;
    waiter_.yields = options_.yields;
    waiter_.stopping = &stopping_;
    for (int i = 0; i < options_.shape.lanes; ++i)
      lanes_.emplace_back(segment_, waiter_, table_, options_.tuning, i, options_.rank);
    if (options_.shape.lanes > 1) threads_ = std::make_unique<Lanes>(options_.shape.lanes);
  }

  ~Group() {
    if (getpid() == process_) {
      close();
    } else {
      segment_.disown();
      (void)threads_.release();  // they did not survive the fork
    }
  }

  // Waits until all ranks are here; then nothing but their mappings keeps the memory.
  Status join(const std::vector<int> &pids, const std::vector<int64_t> &starts, double timeout,
              const std::function<bool()> &interrupted) {
    peers_ = Peers(pids, starts);
    waiter_.interrupted = interrupted;
    segment_.member(options_.rank).state.store(State::kAttached);
    set_timeout(timeout);
    Call call;
    call.counts = {0};
    const Status status = lanes_[0].run(call);
    segment_.close_descriptor();
    waiter_.interrupted = nullptr;
    return status;
  }

  void set_timeout(double seconds) {
    waiter_.timeout.store(std::chrono::duration_cast<Waiter::Clock::duration>(
        std::chrono::duration<double>(seconds)));
  }

  // Whether calls are possible, or why not.
  Status usable() const {
    if (getpid() != process_) return {Reason::kForked, options_.rank};
    // A call after one that stopping has ended would run in that one's slots, while others still
    // read them.
    if (stopping_.load() || closed_) return {Reason::kClosed, options_.rank};
    if (const uint64_t failure = segment_.header().failure.load()) return Status::unpacked(failure);
    return {};
  }

  Status run(const Call &call, const std::function<bool()> &interrupted) {
    if (Status status = usable(); !status) return status;
    const Running running(running_);
    waiter_.interrupted = interrupted;
    const int lanes = static_cast<int>(lanes_.size());
    if (lanes == 1 || bytes_of(call) < kLanesFrom) {
      Status status = lanes_[0].run(call);
      if (status.reason == Reason::kMismatch) mismatch_ = lanes_[0].mismatch();
      return status;
    }
    std::vector<Status> statuses(lanes);
    try {
      threads_->run([&](int lane) { statuses[lane] = lanes_[lane].run(share(call, lane, lanes)); });
    } catch (...) {  // no thread: this rank has no part in the call, which the others must hear
      waiter_.broken({Reason::kInterrupted, options_.rank});
      throw;
    }
    // The rank that found out says most.
    const Status *worst = nullptr;
    for (int lane = 0; lane < lanes; ++lane) {
      const Status &status = statuses[lane];
      if (!status && (!worst || (worst->told && !status.told))) {
        worst = &status;
        if (status.reason == Reason::kMismatch) mismatch_ = lanes_[lane].mismatch();
      }
    }
    return worst ? *worst : Status{};
  }

  const Stamp &mismatch() const { return mismatch_; }
  void set_mismatch(const Stamp &stamp) { mismatch_ = stamp; }
  const Segment &segment() const { return segment_; }
  const Waiter &waiter() const { return waiter_; }
  const Table &table() const { return table_; }
  int rank() const { return options_.rank; }
  int descriptor() const { return segment_.descriptor(); }
  size_t bytes() const { return options_.shape.bytes(); }

  // Breaks the group because this rank was interrupted while it waited for a call; from any thread.
  void interrupt() {
    if (usable()) waiter_.broken({Reason::kInterrupted, options_.rank});
  }

  // Breaks the group because this rank has lost its way to other nodes; from any thread.
  void abandon() {
    if (usable()) waiter_.broken({Reason::kNetwork, options_.rank});
  }

  // Makes calls that wait return, and no other begin, from any thread.
  void stop() { stopping_.store(true); }

  // Tells the others that this rank takes part no more. No call may be running, but the one that a
  // signal's handler has interrupted to close the group: then the memory goes with the object.
  void close() {
    if (closed_ || getpid() != process_) return;
    closed_ = true;
    segment_.member(options_.rank).state.store(State::kClosed);
    for (int lane = 0; lane < options_.shape.lanes; ++lane) {
      Progress &progress = segment_.progress(lane, options_.rank);
      for (Word *word : {&progress.put, &progress.combined, &progress.taken}) wake_all(*word);
    }
    if (running_) return;
    threads_.reset();
    segment_.close_descriptor();
    segment_.unmap();
  }

 private:
  struct Running {
    explicit Running(int &count) : count(count) { ++count; }
    ~Running() { --count; }
    int &count;
  };

  static const Table &table_of(const std::string &instructions) {
    const InstructionSet *set = instruction_set(instructions);
    if (!set) throw std::invalid_argument("this processor does not run " + instructions);
    return *set->table;
  }

  static constexpr int64_t kLanesFrom = 1 << 20;  // bytes of a call that are worth other threads

  static int64_t bytes_of(const Call &call) {
    int64_t total = 0;
    for (const int64_t count : call.counts) total += count;
    return total * static_cast<int64_t>(call.item());
  }

  // Each lane has an equal share of every part, from whole cache lines on.
  static Call share(const Call &whole, int lane, int lanes) {
    Call call = whole;
    const int64_t item = static_cast<int64_t>(whole.item());
    std::vector<int64_t> begins;
    for (int64_t &count : call.counts) {
      const int64_t each = ((count + lanes - 1) / lanes + 63) / 64 * 64;
      const int64_t begin = std::min(count, each * lane);
      begins.push_back(begin);
      count = std::min(each, count - begin);
    }
    // A rank's own part stands alone where the other side has one for each rank.
    const auto move = [&](auto &pointers, int self) {
      for (size_t i = 0; i < pointers.size(); ++i)
        if (pointers[i])
          pointers[i] += begins[pointers.size() == begins.size() ? i : static_cast<size_t>(self)] *
                         item;
    };
    move(call.sources, whole.rank);
    move(call.targets, whole.rank);
    return call;
  }

  Segment segment_;
  Options options_;
  const int process_;
  const Table &table_;
  Peers peers_;
  Waiter waiter_;
  std::vector<Lane> lanes_;
  std::unique_ptr<Lanes> threads_;
  std::atomic<bool> stopping_{false};
  bool closed_ = false;
  int running_ = 0;
  Stamp mismatch_{};
};

}  // namespace hfreduce
