// Linux's older asynchronous reads (what libaio wraps) by raw system calls: a queue of reads, as
// queue.hpp uses it, where io_uring is forbidden.
//
// io_submit waits for the disk unless the descriptor is for direct reads, so this one is used with
// O_DIRECT only. A context reserves its requests from a number that the whole host shares
// (fs.aio-max-nr, 65536 by default), so it has no more than a queue's depth.
#pragma once

#include <linux/aio_abi.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <vector>

namespace ffrecord {

class Aio {
 public:
  explicit Aio(unsigned entries) : process_(getpid()), requests_(entries), events_(entries) {
    waiting_.reserve(entries);
    refused_.reserve(entries);
    if (syscall(SYS_io_setup, entries, &context_) < 0) error_ = errno;
  }

  ~Aio() { release(); }
  Aio(const Aio &) = delete;
  Aio &operator=(const Aio &) = delete;

  // Reads on ordinary descriptors would wait inside io_submit, one after the other.
  static constexpr bool kPlainReads = false;

  int error() const { return error_; }
  bool is_inherited() const { return process_ != getpid(); }

  // In a forked child: a context is no descriptor, and stays with the parent.
  void let_go_after_fork() {}

  void add_read(unsigned slot, int descriptor, void *to, size_t length, int64_t offset) {
    iocb &request = requests_[slot];
    request = {};
    request.aio_data = slot;
    request.aio_lio_opcode = IOCB_CMD_PREAD;
    request.aio_fildes = static_cast<uint32_t>(descriptor);
    request.aio_buf = reinterpret_cast<uintptr_t>(to);
    request.aio_nbytes = length;
    request.aio_offset = offset;
    waiting_.push_back(&request);
  }

  // Hands over what was added and waits for a completion. False: it does not work any more.
  bool submit_and_wait() {
    while (!waiting_.empty()) {
      const long taken = syscall(SYS_io_submit, context_, waiting_.size(), waiting_.data());
      if (taken > 0) {
        waiting_.erase(waiting_.begin(), waiting_.begin() + taken);
        in_flight_ += static_cast<size_t>(taken);
        continue;
      }
      if (taken < 0 && errno == EINTR) continue;
      if (taken == 0 || errno == EAGAIN) {
        if (!in_flight_) return false;  // nothing will make room
        break;
      }
      // The first of them is refused as it stands (a bad descriptor, say): that is its result.
      if (errno == EPERM || errno == ENOSYS) return false;
      refused_.push_back({static_cast<unsigned>(waiting_.front()->aio_data), -errno});
      waiting_.erase(waiting_.begin());
    }
    if (!refused_.empty()) return true;
    return collect(1);
  }

  // Waits until the kernel writes nowhere any more, and takes no more reads.
  template <class Handle>
  void give_up(Handle &&handle) {
    while (in_flight_ && collect(1)) reap(handle);
    error_ = EPERM;
    release();
  }

  template <class Handle>
  void reap(Handle &&handle) {
    if (!collected_) collect(0);
    const size_t count = collected_;
    collected_ = 0;
    for (size_t i = 0; i < count; ++i)
      handle(static_cast<unsigned>(events_[i].data), static_cast<int64_t>(events_[i].res));
    for (const Refused &one : refused_) handle(one.slot, one.result);
    refused_.clear();
  }

 private:
  struct Refused {
    unsigned slot;
    int64_t result;
  };

  // Fetches completions, at least `least` of them. False: that is not possible any more.
  bool collect(long least) {
    if (!in_flight_) return true;
    for (;;) {
      const long got = syscall(SYS_io_getevents, context_, least, events_.size(), events_.data(),
                               nullptr);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) return false;
      collected_ = static_cast<size_t>(got);
      in_flight_ -= collected_;
      return true;
    }
  }

  // The kernel waits for what is in flight. A forked child has no context of its own to end.
  void release() {
    if (context_ && !is_inherited()) syscall(SYS_io_destroy, context_);
    context_ = 0;
  }

  pid_t process_;
  int error_ = 0;
  aio_context_t context_ = 0;
  std::vector<iocb> requests_;      // by slot
  std::vector<io_event> events_;    // the first collected_ are to be handled
  std::vector<iocb *> waiting_;     // added, not submitted
  std::vector<Refused> refused_;
  size_t collected_ = 0, in_flight_ = 0;
};

}  // namespace ffrecord
