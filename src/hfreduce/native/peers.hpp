// Whether the other processes of a group still live.
//
// A pidfd keeps meaning the process that it was opened for, whatever number a later one gets. It is
// opened once; comparing the start time afterwards makes sure that it was opened for the right one.
// Where the kernel has no pidfd the start time is compared each time.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace hfreduce {

// Clock ticks between boot and the start of a process, or -1 where there is none or it is a zombie.
inline int64_t start_time(int pid) {
  const std::string path = "/proc/" + std::to_string(pid) + "/stat";
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return -1;
  char text[1024];
  const ssize_t size = read(descriptor, text, sizeof text - 1);
  close(descriptor);
  if (size <= 0) return -1;
  text[size] = 0;
  // The command's name may hold anything; after its last parenthesis the state is field 3.
  const char *at = std::strrchr(text, ')');
  if (!at || !at[1] || at[2] == 'Z' || at[2] == 'X') return -1;
  ++at;  // the space before field 3
  for (int field = 3; field < 22; ++field)
    if (!(at = std::strchr(at + 1, ' '))) return -1;
  return std::strtoll(at, nullptr, 10);
}

class Peers {
 public:
  Peers() = default;
  Peers(const std::vector<int> &pids, const std::vector<int64_t> &starts)
      : pids_(pids), starts_(starts), descriptors_(pids.size(), -1) {
#ifdef SYS_pidfd_open
    for (size_t i = 0; i < pids.size(); ++i) {
      descriptors_[i] = static_cast<int>(syscall(SYS_pidfd_open, pids[i], 0u));
      if (descriptors_[i] >= 0 && start_time(pids[i]) != starts[i]) {
        close(descriptors_[i]);  // the number is someone else's already: dead by its start time
        descriptors_[i] = -1;
      }
    }
#endif
  }
  Peers(const Peers &) = delete;
  Peers &operator=(Peers &&other) noexcept {
    std::swap(pids_, other.pids_);
    std::swap(starts_, other.starts_);
    std::swap(descriptors_, other.descriptors_);
    return *this;
  }
  ~Peers() {
    for (int descriptor : descriptors_)
      if (descriptor >= 0) close(descriptor);
  }

  bool is_dead(int rank) const {
    const int descriptor = descriptors_[rank];
    if (descriptor < 0) return start_time(pids_[rank]) != starts_[rank];
    pollfd query{descriptor, POLLIN, 0};
    return poll(&query, 1, 0) == 1;
  }

 private:
  std::vector<int> pids_;
  std::vector<int64_t> starts_;
  std::vector<int> descriptors_;
};

}  // namespace hfreduce
