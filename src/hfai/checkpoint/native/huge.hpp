// A part of a file in memory (tmpfs) that is made of huge pages and written through a mapping.
//
// tmpfs keeps pages of 4 KiB, and what each costs, found and counted one by one under a lock of the
// file, is more than its copy: that bounds every write() and every later read(). MADV_COLLAPSE
// (Linux 6.1) makes one huge page of 512 of them, whatever the mount's options are.
#pragma once

#include <sys/mman.h>

#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "calls.hpp"

namespace checkpoint {

// Copies past the caches: the copy is not read again soon, and its old content never.
inline void stream(char *to, const char *from, size_t size) {
#ifdef __SSE2__
  const size_t head = std::min(size, -reinterpret_cast<uintptr_t>(to) % 16);
  std::memcpy(to, from, head);
  size_t at = head;
  for (; at + 64 <= size; at += 64) {
    __m128i parts[4];
    for (int i = 0; i < 4; ++i)
      parts[i] = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from + at) + i);
    for (int i = 0; i < 4; ++i)
      _mm_stream_si128(reinterpret_cast<__m128i *>(to + at) + i, parts[i]);
  }
  std::memcpy(to + at, from + at, size - at);
  _mm_sfence();
#else
  std::memcpy(to, from, size);
#endif
}

class HugePages {
 public:
  static constexpr int64_t kSize = 2 << 20;

  // Maps the whole huge pages that lie between two bytes of a file, where they can be had.
  //
  // They are all there then, so that writing to the mapping cannot fail for want of memory (which
  // would end the process), as long as nobody truncates the file.
  HugePages(int descriptor, int64_t begin, int64_t end) {
    begin = (begin + kSize - 1) / kSize * kSize;
    end = end / kSize * kSize;
    if (end <= begin || !map(descriptor, begin, static_cast<size_t>(end - begin))) return;
    if (make(descriptor, begin, end)) {
      begin_ = begin;
      end_ = end;
    } else {
      unmap();
    }
  }
  ~HugePages() { unmap(); }
  HugePages(const HugePages &) = delete;
  HugePages &operator=(const HugePages &) = delete;

  // The bytes of the file that are mapped; none where these are equal.
  int64_t begin() const { return begin_; }
  int64_t end() const { return end_; }

  void write(int64_t offset, const char *data, size_t size) {
    stream(memory_ + (offset - begin_), data, size);
  }

 private:
  static constexpr int kTries = 3;
  static constexpr int kCollapse = 25;  // MADV_COLLAPSE, which older headers do not have

  // Maps a part at a huge page's begin.
  bool map(int descriptor, int64_t begin, size_t size) {
    const size_t room = size + kSize;
    void *const found = mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED) return false;
    room_ = static_cast<char *>(found);
    room_size_ = room;
    memory_ = room_ + (-reinterpret_cast<uintptr_t>(room_) % kSize);
    size_ = size;
    if (mmap(memory_, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, descriptor, begin) ==
        MAP_FAILED) {
      unmap();
      return false;
    }
    madvise(memory_, size, MADV_DONTFORK);  // a child would keep the file's memory from being freed
    return true;
  }

  // An empty part is not collapsed, so a byte of each huge page is written before.
  bool make(int descriptor, int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; at += kSize) {
      char zero = 0;
      iovec view{&zero, 1};
      if (write_all(descriptor, &view, 1, at + kSize - 1)) return false;
    }
    for (int tries = 0; tries < kTries; ++tries) {
      if (!madvise(memory_, size_, kCollapse)) return true;
      if (errno != EAGAIN) return false;
    }
    return false;
  }

  void unmap() {
    if (room_) munmap(room_, room_size_);
    room_ = memory_ = nullptr;
  }

  char *room_ = nullptr, *memory_ = nullptr;
  size_t room_size_ = 0, size_ = 0;
  int64_t begin_ = 0, end_ = 0;
};

}  // namespace checkpoint
