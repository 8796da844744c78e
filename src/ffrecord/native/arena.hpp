// Memory of batches, used again: a fresh page costs a fault and 4 KiB of zeros, about as much as
// copying a page of data into it.
//
// Whoever holds a block returns it by `give`. Idle blocks are kept up to kMostIdle bytes, the oldest
// are unmapped first. A forked child starts with none: its copies would be paid for page by page.
#pragma once

#include <pthread.h>
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <new>
#include <vector>

namespace ffrecord {

constexpr size_t kMostIdle = 64 << 20;  // bytes
constexpr size_t kLeastArena = 1 << 20;  // bytes; malloc reuses smaller ones well enough
constexpr size_t kArenaStep = 64 * 1024;  // bytes; a multiple of every page size

struct Block {
  uint8_t *memory;
  size_t size;
};

class ArenaPool {
 public:
  // One for the process, never destroyed: arrays may outlive every static object.
  static ArenaPool &of_process() {
    static ArenaPool *pool = [] {
      auto *made = new ArenaPool;
      pthread_atfork([] { of_process().lock_.lock(); }, [] { of_process().lock_.unlock(); },
                     [] {
                       of_process().unmap_idle();
                       of_process().lock_.unlock();
                     });
      return made;
    }();
    return *pool;
  }

  // At least `size` bytes, aligned to a page. Their content is undefined.
  Block take(size_t size) {
    {
      std::lock_guard<std::mutex> guard(lock_);
      size_t best = idle_.size();
      for (size_t i = 0; i < idle_.size(); ++i)
        if (idle_[i].size >= size && idle_[i].size / 2 <= size &&
            (best == idle_.size() || idle_[i].size < idle_[best].size))
          best = i;
      if (best < idle_.size()) {
        const Block block = idle_[best];
        idle_.erase(idle_.begin() + static_cast<std::ptrdiff_t>(best));
        idle_bytes_ -= block.size;
        return block;
      }
    }
    if (size > SIZE_MAX / 2) throw std::bad_alloc();
    // A little more than asked, so that the next batch, which is as large but for chance, fits too.
    const size_t room = size + size / 8;
    const size_t rounded = (room + kArenaStep - 1) / kArenaStep * kArenaStep;
    void *memory =
        mmap(nullptr, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    madvise(memory, rounded, MADV_HUGEPAGE);  // advice: may fail
    return {static_cast<uint8_t *>(memory), rounded};
  }

  void give(Block block) noexcept {
    std::lock_guard<std::mutex> guard(lock_);
    if (block.size > kMostIdle) {
      munmap(block.memory, block.size);
      return;
    }
    while (idle_bytes_ + block.size > kMostIdle) {
      munmap(idle_.front().memory, idle_.front().size);
      idle_bytes_ -= idle_.front().size;
      idle_.erase(idle_.begin());
    }
    try {
      idle_.push_back(block);
      idle_bytes_ += block.size;
    } catch (const std::bad_alloc &) {
      munmap(block.memory, block.size);
    }
  }

  size_t idle_bytes() {
    std::lock_guard<std::mutex> guard(lock_);
    return idle_bytes_;
  }

 private:
  ArenaPool() = default;

  void unmap_idle() {
    for (const Block &block : idle_) munmap(block.memory, block.size);
    idle_.clear();
    idle_bytes_ = 0;
  }

  std::mutex lock_;
  std::vector<Block> idle_;  // the one that was given back first in front
  size_t idle_bytes_ = 0;
};

// A block for as long as this lives.
class Arena {
 public:
  explicit Arena(size_t size) : block_(ArenaPool::of_process().take(size)) {}
  ~Arena() { ArenaPool::of_process().give(block_); }
  Arena(const Arena &) = delete;
  Arena &operator=(const Arena &) = delete;

  uint8_t *memory() const { return block_.memory; }

 private:
  Block block_;
};

}  // namespace ffrecord
