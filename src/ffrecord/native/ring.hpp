// io_uring by raw system calls: a queue of reads, as queue.hpp uses it.
#pragma once

#include <fcntl.h>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>

namespace ffrecord {

constexpr int kMostRefusals = 1000;  // in a row, with nothing in flight: 0.1 s

class Ring {
 public:
  explicit Ring(unsigned entries) : process_(getpid()) {
    io_uring_params parameters{};
    descriptor_ = static_cast<int>(syscall(SYS_io_uring_setup, entries, &parameters));
    if (descriptor_ < 0) {
      error_ = errno;
      return;
    }
    fcntl(descriptor_, F_SETFD, FD_CLOEXEC);
    if (!(parameters.features & IORING_FEAT_SINGLE_MMAP)) {
      fail(ENOSYS);  // before 5.4; plain reads came with 5.6
      return;
    }
    ring_bytes_ = std::max<size_t>(
        parameters.sq_off.array + parameters.sq_entries * sizeof(unsigned),
        parameters.cq_off.cqes + parameters.cq_entries * sizeof(io_uring_cqe));
    entry_bytes_ = parameters.sq_entries * sizeof(io_uring_sqe);
    void *ring = mmap(nullptr, ring_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
                      descriptor_, IORING_OFF_SQ_RING);
    if (ring == MAP_FAILED) {
      fail(errno);
      return;
    }
    ring_ = static_cast<uint8_t *>(ring);
    void *mapped = mmap(nullptr, entry_bytes_, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_POPULATE, descriptor_, IORING_OFF_SQES);
    if (mapped == MAP_FAILED) {
      fail(errno);
      return;
    }
    entries_ = static_cast<io_uring_sqe *>(mapped);
    submit_tail_ = word(parameters.sq_off.tail);
    submit_mask_ = *word(parameters.sq_off.ring_mask);
    submit_array_ = word(parameters.sq_off.array);
    complete_head_ = word(parameters.cq_off.head);
    complete_tail_ = word(parameters.cq_off.tail);
    complete_mask_ = *word(parameters.cq_off.ring_mask);
    completions_ = reinterpret_cast<io_uring_cqe *>(ring_ + parameters.cq_off.cqes);
  }

  ~Ring() { release(); }
  Ring(const Ring &) = delete;
  Ring &operator=(const Ring &) = delete;

  static constexpr bool kPlainReads = true;

  int error() const { return error_; }
  bool is_inherited() const { return process_ != getpid(); }

  // In a forked child, before anybody can close the ring's descriptor and use its number again.
  void let_go_after_fork() { fail(EOWNERDEAD); }

  void add_read(unsigned slot, int descriptor, void *to, size_t length, int64_t offset) {
    add(slot, IORING_OP_READ, descriptor, to, static_cast<unsigned>(length), offset);
  }

  // The vector of buffers stays where it is until the read is done.
  void add_read_vector(unsigned slot, int descriptor, const iovec *vector, size_t count,
                       int64_t offset) {
    add(slot, IORING_OP_READV, descriptor, vector, static_cast<unsigned>(count), offset);
  }

  // Hands over what was added and waits for a completion. False: the ring does not work any more.
  bool submit_and_wait() {
    for (int refused = 0;;) {
      const long taken = syscall(SYS_io_uring_enter, descriptor_, unsubmitted_, 1,
                                 IORING_ENTER_GETEVENTS, nullptr, 0);
      if (taken >= 0) {
        unsubmitted_ -= static_cast<unsigned>(taken);
        in_flight_ += static_cast<unsigned>(taken);
        return true;
      }
      if (errno == EINTR) continue;
      if (errno != EAGAIN && errno != EBUSY) return false;
      // Busy or out of memory: once something completes there is room.
      if (!in_flight_ && ++refused == kMostRefusals) return false;
      usleep(100);
    }
  }

  // Waits until the kernel writes nowhere any more, and takes no more reads.
  template <class Handle>
  void give_up(Handle &&handle) {
    for (; in_flight_; reap(handle)) usleep(100);
    fail(EPERM);
  }

  // Calls handle(slot, bytes or -errno) for what has completed.
  template <class Handle>
  void reap(Handle &&handle) {
    unsigned head = *complete_head_;
    while (head != __atomic_load_n(complete_tail_, __ATOMIC_ACQUIRE)) {
      const io_uring_cqe done = completions_[head & complete_mask_];
      __atomic_store_n(complete_head_, ++head, __ATOMIC_RELEASE);
      --in_flight_;
      handle(static_cast<unsigned>(done.user_data), static_cast<int64_t>(done.res));
    }
  }

 private:
  unsigned *word(unsigned offset) { return reinterpret_cast<unsigned *>(ring_ + offset); }

  void add(unsigned slot, uint8_t opcode, int descriptor, const void *address, unsigned length,
           int64_t offset) {
    const unsigned tail = *submit_tail_, at = tail & submit_mask_;
    io_uring_sqe &entry = entries_[at];
    entry = {};
    entry.opcode = opcode;
    entry.fd = descriptor;
    entry.addr = reinterpret_cast<uintptr_t>(address);
    entry.len = length;
    entry.off = static_cast<uint64_t>(offset);
    entry.user_data = slot;
    submit_array_[at] = at;
    __atomic_store_n(submit_tail_, tail + 1, __ATOMIC_RELEASE);
    ++unsubmitted_;
  }

  void fail(int why) {
    error_ = why;
    release();
  }

  void release() {
    if (entries_) munmap(entries_, entry_bytes_);
    if (ring_) munmap(ring_, ring_bytes_);
    if (descriptor_ >= 0) close(descriptor_);
    entries_ = nullptr, ring_ = nullptr, descriptor_ = -1;
  }

  pid_t process_;
  int descriptor_ = -1, error_ = 0;
  size_t ring_bytes_ = 0, entry_bytes_ = 0;
  uint8_t *ring_ = nullptr;
  io_uring_sqe *entries_ = nullptr;
  unsigned *submit_tail_ = nullptr, *submit_array_ = nullptr;
  unsigned *complete_head_ = nullptr, *complete_tail_ = nullptr;
  unsigned submit_mask_ = 0, complete_mask_ = 0, unsubmitted_ = 0, in_flight_ = 0;
  io_uring_cqe *completions_ = nullptr;
};

}  // namespace ffrecord
