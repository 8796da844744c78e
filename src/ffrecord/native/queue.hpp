// Runs that must wait for the disk, many at once, through a queue of the kernel's: io_uring
// (ring.hpp) or Linux AIO (aio.hpp).
//
// With `direct` the pages go past the cache (O_DIRECT) through aligned buffers and are copied into
// place. Whatever a queue cannot do (a file system without O_DIRECT, an odd alignment, a short
// completion) is done by a plain read, which also finds the words for real errors.
//
// A thread has its own queue, made at its first need and again after a fork.
#pragma once

#include <fcntl.h>
#include <pthread.h>

#include <array>
#include <cstdio>
#include <map>
#include <memory>

#include "aio.hpp"
#include "arena.hpp"
#include "ring.hpp"
#include "threads.hpp"

namespace ffrecord {

constexpr unsigned kEntries = 128;
constexpr unsigned kLeastDepth = 32;
constexpr int64_t kAlignment = 4096;
constexpr int64_t kPiece = 256 * 1024;  // bytes of one direct read, a multiple of the alignment

// This thread's queue, or null with `why` set.
template <class Queue>
inline Queue *thread_queue(int &why) {
  thread_local std::unique_ptr<Queue> queue;
  // The handler runs in the thread that forks, the only one that lives on in the child.
  static const int registered = pthread_atfork(nullptr, nullptr, [] {
    if (queue) queue->let_go_after_fork();
  });
  if ((why = registered)) return nullptr;
  if (!queue || queue->is_inherited() || queue->error()) queue = std::make_unique<Queue>(kEntries);
  why = queue->error();
  return why ? nullptr : queue.get();
}

// One read in flight: a whole run, or with O_DIRECT a piece of one.
struct Piece {
  size_t run;
  int descriptor;  // for direct reads, or -1: a plain read of the run
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
    const Request &first = batch.requests[runs[i].first];
    const int64_t end = first.offset + batch.length(runs[i]);
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

// Reads in flight and where they stand. Everything is allocated before anything is in flight:
// nothing may throw while the kernel writes.
template <class Queue>
class Flight {
 public:
  Flight(Batch &batch, const std::vector<Run> &runs, const std::vector<Piece> &pieces,
         Queue &queue)
      : batch_(batch),
        runs_(runs),
        pieces_(pieces),
        queue_(queue),
        left_(runs.size()),
        again_(runs.size()),
        depth_(std::clamp<size_t>(pieces.size() / 4, kLeastDepth, kEntries)),
        in_slot_(depth_) {
    bool plain = false;
    for (const Piece &piece : pieces) {
      ++left_[piece.run];
      if (piece.descriptor < 0)
        plain = true;
      else
        stride_ = std::max(stride_, static_cast<size_t>(piece.length));
    }
    if (stride_) buffers_ = std::make_unique<Arena>(stride_ * depth_);
    vectors_.resize(plain ? depth_ : 0);
    for (size_t slot = depth_; slot--;) free_slots_.push_back(static_cast<unsigned>(slot));
  }

  void read() {
    size_t next = 0;
    const auto finish = [this](unsigned slot, int64_t result) { this->finish(slot, result); };
    while (done_ < pieces_.size()) {
      while (next < pieces_.size() && !free_slots_.empty()) {
        const unsigned slot = free_slots_.back();
        free_slots_.pop_back();
        start(next++, slot);
      }
      const bool works = queue_.submit_and_wait();
      queue_.reap(finish);
      if (works) continue;
      // A queue that was forbidden after it was made: the rest is read without.
      queue_.give_up(finish);
      for (size_t i = 0; i < runs_.size(); ++i)
        if (left_[i]) read_run(batch_, runs_[i], 0);
      return;
    }
  }

 private:
  uint8_t *buffer(unsigned slot) { return buffers_->memory() + slot * stride_; }

  void start(size_t number, unsigned slot) {
    const Piece &piece = pieces_[number];
    in_slot_[slot] = number;
    if constexpr (Queue::kPlainReads) {
      if (piece.descriptor < 0) {
        const Run &run = runs_[piece.run];
        iovec *vector = vectors_[slot].data();
        for (size_t i = run.first; i < run.last; ++i)
          vector[i - run.first] = {batch_.requests[i].to,
                                   static_cast<size_t>(batch_.requests[i].length)};
        queue_.add_read_vector(slot, batch_.requests[run.first].descriptor, vector,
                               run.last - run.first, piece.offset);
        return;
      }
    }
    queue_.add_read(slot, piece.descriptor, buffer(slot), static_cast<size_t>(piece.length),
                    piece.offset);
  }

  void finish(unsigned slot, int64_t result) {
    const Piece &piece = pieces_[in_slot_[slot]];
    const Run &run = runs_[piece.run];
    const bool whole = piece.descriptor >= 0
                           ? result > 0 && place(batch_, run, piece, buffer(slot), result)
                           : result == piece.length;
    again_[piece.run] |= !whole;
    free_slots_.push_back(slot);
    ++done_;
    if (--left_[piece.run]) return;
    if (again_[piece.run])
      read_run(batch_, run, 0);
    else
      for (size_t i = run.first; i < run.last; ++i) batch_.complete(batch_.requests[i]);
  }

  Batch &batch_;
  const std::vector<Run> &runs_;
  const std::vector<Piece> &pieces_;
  Queue &queue_;
  std::vector<size_t> left_;  // pieces of each run
  std::vector<char> again_;   // runs that a plain read must do
  size_t depth_, done_ = 0, stride_ = 0;
  std::vector<size_t> in_slot_;
  std::vector<unsigned> free_slots_;
  std::unique_ptr<Arena> buffers_;
  std::vector<std::array<iovec, kMostBuffers>> vectors_;
};

// False: the queue cannot be had; nothing was read.
template <class Queue>
inline bool read_by_queue(Batch &batch, const std::vector<Run> &runs, bool direct) {
  if (runs.empty()) return true;
  int why = 0;
  Queue *queue = thread_queue<Queue>(why);
  if (!queue) return false;
  DirectFiles files;
  std::vector<Piece> pieces = cut(batch, runs, direct, files);
  std::vector<Run> plain;
  if constexpr (!Queue::kPlainReads) {
    const auto end = std::stable_partition(pieces.begin(), pieces.end(),
                                           [](const Piece &piece) { return piece.descriptor >= 0; });
    for (auto piece = end; piece != pieces.end(); ++piece) plain.push_back(runs[piece->run]);
    pieces.erase(end, pieces.end());
  }
  if (!pieces.empty()) Flight<Queue>(batch, runs, pieces, *queue).read();
  read_by_threads(batch, plain);
  return true;
}

// Makes a queue and reads through it from an open file. Returns 0, or why it does not work.
template <class Queue>
inline int probe_queue(int descriptor) {
  int why = 0;
  Queue *queue = thread_queue<Queue>(why);
  if (!queue) return why;
  uint8_t byte = 0, expected = 0;
  if (pread(descriptor, &expected, 1, 0) != 1) return EIO;
  queue->add_read(0, descriptor, &byte, 1, 0);
  int64_t result = -EIO;
  // A signal may end the wait before the read is done, and its byte lies on this stack.
  for (bool done = false; !done;) {
    if (!queue->submit_and_wait()) {
      const int code = errno;
      queue->give_up([](unsigned, int64_t) {});
      return code ? code : EIO;
    }
    queue->reap([&](unsigned, int64_t got) {
      result = got;
      done = true;
    });
  }
  if (result < 0) return static_cast<int>(-result);
  return result == 1 && byte == expected ? 0 : EIO;
}

}  // namespace ffrecord
