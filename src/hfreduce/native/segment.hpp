// The memory that the ranks of one group on one node share, and what lies where in it.
//
// It is an anonymous file of tmpfs (memfd): it has no name that two jobs could both choose or that a
// killed process could leave behind, /dev/shm's size does not bound it, and the kernel frees it with
// the last process that maps it. Peers open it through /proc/<pid>/fd and compare a random token.
//
//   Header, with one Member a rank
//   lanes x ranks x Progress
//   lanes x ranks x slots x (slot_bytes of data, Stamp), each from a page on
#pragma once

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>
#include <system_error>

namespace hfreduce {

constexpr size_t kPage = 4096, kHugePage = 2 << 20;
constexpr size_t kTokenBytes = 16;

// A counter that one rank advances and others wait for. It grows by one a chunk and wraps around.
struct alignas(64) Word {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> waiters;  // that sleep in the kernel, or slept when they were killed
};

// How many chunks a rank has put into its slots, has combined its slice of, and no longer needs.
struct Progress {
  Word put, combined, taken;
};

// Failed: a call has ended with an error, which the header says, and no other begins.
enum class State : uint32_t { kAbsent, kAttached, kFailed, kClosed };

struct alignas(64) Member {
  std::atomic<State> state;
};

// What a rank is doing, beside the data of each chunk: ranks that call different things find out.
struct alignas(64) Stamp {
  uint64_t digest;  // of everything that must be equal on all ranks
  int64_t count;
  int32_t root;
  uint8_t kind, dtype, op;
};

struct alignas(64) Header {
  char token[kTokenBytes];
  std::atomic<uint64_t> failure;  // 0, or how the group broke: see Status
};

struct Shape {
  int world = 0, lanes = 0, slots = 0;
  size_t slot_bytes = 0;

  size_t progress_at() const { return sizeof(Header) + sizeof(Member) * world; }
  size_t slots_at() const {
    return round_up(progress_at() + sizeof(Progress) * lanes * world, kPage);
  }
  size_t stamp_at() const { return round_up(slot_bytes, sizeof(Stamp)); }
  size_t stride() const { return round_up(stamp_at() + sizeof(Stamp), kPage); }
  size_t bytes() const { return slots_at() + stride() * slots * world * lanes; }
  static size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }
};

[[noreturn]] inline void fail(const char *what) {
  throw std::system_error(errno, std::generic_category(), what);
}

class Segment {
 public:
  // Creates the memory, all of it backed at once: later there could only be a SIGBUS.
  static Segment create(const Shape &shape, const std::string &token) {
    const int descriptor = static_cast<int>(
        syscall(SYS_memfd_create, "hfreduce", 3u /* MFD_CLOEXEC | MFD_ALLOW_SEALING */));
    if (descriptor < 0) fail("memfd_create");
    Segment segment(shape, descriptor);
    int code;  // neither ftruncate nor fallocate sets out what is not there
    if (ftruncate(descriptor, static_cast<off_t>(shape.bytes())) < 0) fail("ftruncate");
    if (shape.slot_bytes >= kHugePage / 2) segment.fill_with_huge_pages();
    if ((code = posix_fallocate(descriptor, 0, static_cast<off_t>(shape.bytes()))) != 0) {
      errno = code;
      fail("fallocate");
    }
    constexpr int kAddSeals = 1033, kSeal = 1, kShrink = 2, kGrow = 4;  // F_ADD_SEALS, F_SEAL_…
    fcntl(descriptor, kAddSeals, kSeal | kShrink | kGrow);
    segment.map();
    std::memcpy(segment.header().token, token.data(), kTokenBytes);
    return segment;
  }

  // Opens what another process created.
  static Segment open(const Shape &shape, const std::string &token, int pid, int descriptor) {
    const std::string path =
        "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(descriptor);
    const int opened = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (opened < 0) fail(path.c_str());
    Segment segment(shape, opened);
    struct stat status;
    if (fstat(opened, &status) < 0) fail("fstat");
    // Another file under this number: the process that made ours is gone.
    const bool fits = static_cast<size_t>(status.st_size) == shape.bytes();
    if (fits) segment.map();
    if (!fits || std::memcmp(segment.header().token, token.data(), kTokenBytes) != 0) {
      errno = ESTALE;
      fail(path.c_str());
    }
    return segment;
  }

  Segment(Segment &&other) noexcept : shape_(other.shape_) {
    std::swap(descriptor_, other.descriptor_);
    std::swap(base_, other.base_);
  }
  Segment(const Segment &) = delete;
  ~Segment() {
    close_descriptor();
    unmap();
  }

  void unmap() {
    if (base_) munmap(base_, shape_.bytes());
    base_ = nullptr;
  }

  void close_descriptor() {
    if (descriptor_ >= 0) ::close(descriptor_);
    descriptor_ = -1;
  }

  // A forked child has no such mapping: it must neither use nor unmap it.
  void disown() { base_ = nullptr; }

  int descriptor() const { return descriptor_; }
  char *base() const { return base_; }
  const Shape &shape() const { return shape_; }
  Header &header() const { return *reinterpret_cast<Header *>(base_); }
  Member &member(int rank) const {
    return reinterpret_cast<Member *>(base_ + sizeof(Header))[rank];
  }
  Progress &progress(int lane, int rank) const {
    return reinterpret_cast<Progress *>(base_ + shape_.progress_at())[lane * shape_.world + rank];
  }
  // The least of a counter over all ranks in lane 0, and whose it is.
  struct Least {
    uint32_t value;
    int rank;
  };
  Least least(Word Progress::*step) const {
    Least found{(progress(0, 0).*step).value.load(std::memory_order_acquire), 0};
    for (int r = 1; r < shape_.world; ++r) {
      const uint32_t value = (progress(0, r).*step).value.load(std::memory_order_acquire);
      if (static_cast<int32_t>(found.value - value) > 0) found = {value, r};
    }
    return found;
  }

  char *slot(int lane, int rank, uint32_t chunk) const {
    const size_t index =
        (static_cast<size_t>(lane) * shape_.world + rank) * shape_.slots + chunk % shape_.slots;
    return base_ + shape_.slots_at() + shape_.stride() * index;
  }
  Stamp &stamp(int lane, int rank, uint32_t chunk) const {
    return *reinterpret_cast<Stamp *>(slot(lane, rank, chunk) + shape_.stamp_at());
  }

 private:
  Segment(const Shape &shape, int descriptor) : shape_(shape), descriptor_(descriptor) {}

  // Copies of a GPU and sums run through slots of MiB: large pages spare them the look-ups, where
  // the system gives shared memory any. What it does not give, fallocate makes of small ones.
  void fill_with_huge_pages() const {
    constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE: an error in place of a SIGBUS
    void *base = mmap(nullptr, shape_.bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0);
    if (base == MAP_FAILED) return;
    madvise(base, shape_.bytes(), MADV_HUGEPAGE);
    madvise(base, shape_.bytes(), kPopulateWrite);
    munmap(base, shape_.bytes());
  }

  void map() {
    void *base = mmap(nullptr, shape_.bytes(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
                      descriptor_, 0);
    if (base == MAP_FAILED) fail("mmap");
    base_ = static_cast<char *>(base);
    // Children neither need it nor may they keep it alive; and pinned memory must not be forked.
    madvise(base_, shape_.bytes(), MADV_DONTFORK);
  }

  Shape shape_;
  int descriptor_ = -1;
  char *base_ = nullptr;
};

}  // namespace hfreduce
