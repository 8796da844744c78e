// Runs that must wait for the disk, through io_uring by raw system calls, many at once.
//
// With `direct` the pages go past the cache (O_DIRECT) through aligned buffers of the ring and are
// copied into place; a set larger than memory is read so twice as fast. Whatever a ring cannot do (a
// file system without O_DIRECT, an odd alignment, a short completion) is done by a plain read,
// which also finds the words for real errors.
//
// A thread has its own ring, made at its first need and again after a fork.
#pragma once

#include <fcntl.h>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include <array>
#include <cstdio>
#include <map>
#include <memory>

#include "batch.hpp"

namespace ffrecord {

constexpr unsigned kEntries = 128;
constexpr unsigned kLeastDepth = 32;
constexpr int64_t kAlignment = 4096;
constexpr int64_t kPiece = 256 * 1024;  // bytes of one direct read, a multiple of the alignment

class Ring {
 public:
  Ring() : process_(getpid()) {
    io_uring_params parameters{};
    descriptor_ = static_cast<int>(syscall(SYS_io_uring_setup, kEntries, &parameters));
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
    void *entries = mmap(nullptr, entry_bytes_, PROT_READ | PROT_WRITE,
                         MAP_SHARED | MAP_POPULATE, descriptor_, IORING_OFF_SQES);
    if (entries == MAP_FAILED) {
      fail(errno);
      return;
    }
    entries_ = static_cast<io_uring_sqe *>(entries);
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

  int error() const { return error_; }
  bool is_inherited() const { return process_ != getpid(); }

  // One aligned buffer of kPiece bytes for each entry; memory is taken as it is touched.
  uint8_t *buffer(unsigned slot) {
    if (!buffers_) {
      void *memory = mmap(nullptr, kEntries * kPiece, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (memory == MAP_FAILED) return nullptr;
      buffers_ = static_cast<uint8_t *>(memory);
    }
    return buffers_ + slot * kPiece;
  }

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

  // Hands over what was added and waits for a completion. False: the ring does not work any more.
  bool submit_and_wait() {
    for (;;) {
      const long taken = syscall(SYS_io_uring_enter, descriptor_, unsubmitted_, 1,
                                 IORING_ENTER_GETEVENTS, nullptr, 0);
      if (taken >= 0) {
        unsubmitted_ -= static_cast<unsigned>(taken);
        return true;
      }
      // Busy or out of memory: once something completes there is room.
      if (errno != EINTR && errno != EAGAIN && errno != EBUSY) return false;
    }
  }

  unsigned unsubmitted() const { return unsubmitted_; }
  void give_up() { fail(EPERM); }

  template <class Handle>
  void reap(Handle &&handle) {
    unsigned head = *complete_head_;
    while (head != __atomic_load_n(complete_tail_, __ATOMIC_ACQUIRE)) {
      const io_uring_cqe done = completions_[head & complete_mask_];
      __atomic_store_n(complete_head_, ++head, __ATOMIC_RELEASE);
      handle(static_cast<unsigned>(done.user_data), done.res);
    }
  }

 private:
  unsigned *word(unsigned offset) { return reinterpret_cast<unsigned *>(ring_ + offset); }

  void fail(int why) {
    error_ = why;
    release();
  }

  void release() {
    if (buffers_) munmap(buffers_, kEntries * kPiece);
    if (entries_) munmap(entries_, entry_bytes_);
    if (ring_) munmap(ring_, ring_bytes_);
    if (descriptor_ >= 0) close(descriptor_);
    buffers_ = nullptr, entries_ = nullptr, ring_ = nullptr, descriptor_ = -1;
  }

  pid_t process_;
  int descriptor_ = -1, error_ = 0;
  size_t ring_bytes_ = 0, entry_bytes_ = 0;
  uint8_t *ring_ = nullptr, *buffers_ = nullptr;
  io_uring_sqe *entries_ = nullptr;
  unsigned *submit_tail_ = nullptr, *submit_array_ = nullptr;
  unsigned *complete_head_ = nullptr, *complete_tail_ = nullptr;
  unsigned submit_mask_ = 0, complete_mask_ = 0, unsubmitted_ = 0;
  io_uring_cqe *completions_ = nullptr;
};

inline std::unique_ptr<Ring> &ring_slot() {
  thread_local std::unique_ptr<Ring> ring;
  return ring;
}

// This thread's ring, or null with `why` set.
inline Ring *thread_ring(int &why) {
  std::unique_ptr<Ring> &ring = ring_slot();
  if (!ring || ring->is_inherited() || ring->error()) ring = std::make_unique<Ring>();
  why = ring->error();
  return why ? nullptr : ring.get();
}

// One read in flight: a whole run, or with O_DIRECT a piece of one.
struct Piece {
  size_t run;
  int descriptor;
  int64_t offset, length;
};

// Descriptors for direct reads, reopened from the plain ones; -1 where a file has none.
class DirectFiles {
 public:
  ~DirectFiles() {
    for (const auto &[plain, direct] : files_)
      if (direct >= 0) close(direct);
  }
  int of(int plain) {
    const auto found = files_.find(plain);
    if (found != files_.end()) return found->second;
    char path[40];
    snprintf(path, sizeof path, "/proc/self/fd/%d", plain);
    return files_[plain] = open(path, O_RDONLY | O_DIRECT | O_CLOEXEC);
  }

 private:
  std::map<int, int> files_;
};

inline std::vector<Piece> cut(const Batch &batch, const std::vector<Run> &runs, bool direct,
                              DirectFiles &files) {
  std::vector<Piece> pieces;
  for (size_t i = 0; i < runs.size(); ++i) {
    const Request &first = batch.requests[runs[i].first], &last = batch.requests[runs[i].last - 1];
    const int64_t end = last.offset + last.length;
    const int file = direct ? files.of(first.descriptor) : -1;
    if (file < 0) {
      pieces.push_back({i, -1, first.offset, end - first.offset});
      continue;
    }
    const int64_t start = first.offset & -kAlignment;
    const int64_t stop = (end + kAlignment - 1) & -kAlignment;
    for (int64_t at = start; at < stop; at += kPiece)
      pieces.push_back({i, file, at, std::min(kPiece, stop - at)});
  }
  return pieces;
}

// Copies the part of a run that a piece has read. False: the piece is shorter than the run needs.
inline bool place(const Batch &batch, const Run &run, const Piece &piece, const uint8_t *data,
                  int64_t size) {
  for (size_t i = run.first; i < run.last; ++i) {
    const Request &request = batch.requests[i];
    const int64_t from = std::max(request.offset, piece.offset);
    const int64_t wanted = std::min(request.offset + request.length, piece.offset + piece.length);
    if (from >= wanted) continue;
    if (wanted > piece.offset + size) return false;
    std::memcpy(request.to + (from - request.offset), data + (from - piece.offset),
                static_cast<size_t>(wanted - from));
  }
  return true;
}

// False: the ring cannot be had; nothing was read.
inline bool read_by_ring(Batch &batch, const std::vector<Run> &runs, bool direct) {
  if (runs.empty()) return true;
  int why = 0;
  Ring *ring = thread_ring(why);
  if (!ring || (direct && !ring->buffer(0))) return false;
  DirectFiles files;
  const std::vector<Piece> pieces = cut(batch, runs, direct, files);
  struct State {
    size_t left = 0;
    bool again = false;
  };
  std::vector<State> states(runs.size());
  for (const Piece &piece : pieces) ++states[piece.run].left;

  const auto depth = static_cast<unsigned>(
      std::clamp<size_t>(pieces.size() / 4, kLeastDepth, kEntries));
  std::vector<unsigned> free_slots;
  for (unsigned slot = depth; slot--;) free_slots.push_back(slot);
  std::vector<size_t> in_slot(depth);
  // Allocated before anything is in flight: nothing below may throw while the kernel writes.
  const bool plain = std::any_of(pieces.begin(), pieces.end(),
                                 [](const Piece &piece) { return piece.descriptor < 0; });
  std::vector<std::array<iovec, kMostBuffers>> buffers(plain ? depth : 0);

  auto start = [&](size_t number, unsigned slot) {
    const Piece &piece = pieces[number];
    const Run &run = runs[piece.run];
    in_slot[slot] = number;
    if (piece.descriptor >= 0) {
      ring->add(slot, IORING_OP_READ, piece.descriptor, ring->buffer(slot),
                static_cast<unsigned>(piece.length), piece.offset);
      return;
    }
    iovec *vector = buffers[slot].data();
    for (size_t i = run.first; i < run.last; ++i)
      vector[i - run.first] = {batch.requests[i].to,
                               static_cast<size_t>(batch.requests[i].length)};
    ring->add(slot, IORING_OP_READV, batch.requests[run.first].descriptor, vector,
              static_cast<unsigned>(run.last - run.first), piece.offset);
  };
  auto finish = [&](unsigned slot, int result) {
    const Piece &piece = pieces[in_slot[slot]];
    const Run &run = runs[piece.run];
    State &state = states[piece.run];
    const bool whole = piece.descriptor >= 0
                           ? result > 0 && place(batch, run, piece, ring->buffer(slot), result)
                           : result == piece.length;
    state.again |= !whole;
    free_slots.push_back(slot);
    if (--state.left) return;
    if (state.again)
      read_run(batch, run, 0);
    else
      for (size_t i = run.first; i < run.last; ++i) batch.complete(batch.requests[i]);
  };

  size_t next = 0, done = 0;
  while (done < pieces.size()) {
    while (next < pieces.size() && !free_slots.empty()) {
      const unsigned slot = free_slots.back();
      free_slots.pop_back();
      start(next++, slot);
    }
    const bool works = ring->submit_and_wait();
    const auto reap = [&](unsigned slot, int result) {
      finish(slot, result);
      ++done;
    };
    ring->reap(reap);
    if (works) continue;
    // A ring that was forbidden after it was made. The kernel still writes what it has accepted
    // into our memory: wait for that, then read the rest without a ring.
    for (; done + ring->unsubmitted() < next; ring->reap(reap)) usleep(100);
    ring->give_up();
    for (size_t i = 0; i < runs.size(); ++i)
      if (states[i].left) read_run(batch, runs[i], 0);
    return true;
  }
  return true;
}

// Makes a ring and reads through it from an open file. Returns 0, or why it does not work.
inline int probe_ring(int descriptor) {
  int why = 0;
  Ring *ring = thread_ring(why);
  if (!ring) return why;
  uint8_t byte = 0, expected = 0;
  if (pread(descriptor, &expected, 1, 0) != 1) return EIO;
  ring->add(0, IORING_OP_READ, descriptor, &byte, 1, 0);
  if (!ring->submit_and_wait()) return errno;
  int result = -EIO;
  ring->reap([&](unsigned, int got) { result = got; });
  if (result < 0) return -result;
  return result == 1 && byte == expected ? 0 : EIO;
}

}  // namespace ffrecord
