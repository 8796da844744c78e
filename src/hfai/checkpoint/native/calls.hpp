// The system calls that move bytes, repeated until all are moved.
#pragma once

#include <fcntl.h>
#include <sys/statfs.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace checkpoint {

constexpr size_t kMostViews = 1000;  // of one call; Linux takes 1024
constexpr int kEnded = -1;           // in place of an errno: the file ends before

// Tests enumerate the calls that change a file: called before and after each, where it is set.
inline std::atomic<void (*)()> boundary{nullptr};

inline void at_boundary() {
  if (void (*call)() = boundary.load(std::memory_order_relaxed)) call();
}

// Drops the first `done` bytes of some memory.
inline void advance(iovec *&views, size_t &count, size_t done) {
  while (count && done >= views->iov_len) {
    done -= views->iov_len;
    ++views;
    --count;
  }
  if (count) {
    views->iov_base = static_cast<char *>(views->iov_base) + done;
    views->iov_len -= done;
  }
}

// Returns 0, an errno or kEnded.
inline int read_all(int descriptor, iovec *views, size_t count, int64_t offset) {
  advance(views, count, 0);
  while (count) {
    const ssize_t done = preadv(descriptor, views, static_cast<int>(count), offset);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) return errno;
    if (done == 0) return kEnded;
    offset += done;
    advance(views, count, static_cast<size_t>(done));
  }
  return 0;
}

// Returns 0 or an errno.
inline int write_all(int descriptor, iovec *views, size_t count, int64_t offset) {
  advance(views, count, 0);
  while (count) {
    at_boundary();
    const ssize_t done = pwritev(descriptor, views, static_cast<int>(count), offset);
    const int code = done < 0 ? errno : 0;
    at_boundary();
    if (code == EINTR) continue;
    if (code) return code;
    if (done == 0) return EIO;
    offset += done;
    advance(views, count, static_cast<size_t>(done));
  }
  return 0;
}

inline bool is_in_memory(int descriptor) {
  constexpr long kTmpfs = 0x01021994, kRamfs = static_cast<long>(0x858458f6);
  struct statfs found;
  if (fstatfs(descriptor, &found)) return false;
  return static_cast<long>(found.f_type) == kTmpfs || static_cast<long>(found.f_type) == kRamfs;
}

// Asks for a file's blocks at once: a disk that is full says so before anything is written, and the
// flush has no blocks left to find. The size stays what was written. Returns 0 or an errno.
inline int reserve(int descriptor, int64_t size) {
  if (size <= 0) return 0;
  at_boundary();
  int code;
  do {
    code = fallocate(descriptor, FALLOC_FL_KEEP_SIZE, 0, size) ? errno : 0;
  } while (code == EINTR);
  at_boundary();
  // Others mean that this file system cannot, and writing will find its blocks.
  return code == ENOSPC || code == EDQUOT || code == EFBIG || code == EIO ? code : 0;
}

}  // namespace checkpoint
