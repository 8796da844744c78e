// A loader's worker that outlives a signal to the whole job.
//
// A cluster engine sends SIGTERM to every process of a job. torch's worker processes die of it,
// and the training fails on its next batch, before it comes to the step boundary at which it would
// have saved. But the worker's own parent ends it by SIGTERM too, so it cannot just be ignored: who
// sent it decides, which a handler written in Python is not told.

#include <nanobind/nanobind.h>

#include <csignal>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <unistd.h>
#include <vector>

#include <nanobind/stl/vector.h>

namespace nb = nanobind;

namespace {

// Runs in signal context: only async-signal-safe calls.
void on_signal(int number, siginfo_t *info, void *) {
  const bool sent = info->si_code == SI_USER || info->si_code == SI_QUEUE || info->si_code == SI_TKILL;
  if (number == SIGTERM && sent && info->si_pid > 0 && info->si_pid == getppid()) _exit(0);
}

void ignore_from_others(const std::vector<int> &numbers) {
  struct sigaction action {};
  action.sa_sigaction = on_signal;
  // Calls of libraries that were waiting go on as if nothing had come.
  action.sa_flags = SA_SIGINFO | SA_RESTART;
  sigemptyset(&action.sa_mask);
  for (const int number : numbers) {
    if (sigaction(number, &action, nullptr) != 0) {
      throw std::runtime_error("signal " + std::to_string(number) + ": " + std::strerror(errno));
    }
  }
}

}  // namespace

NB_MODULE(_worker_signals, module) {
  module.doc() = "A loader's worker that outlives a signal to the whole job.";
  module.def("ignore_from_others", &ignore_from_others, nb::arg("numbers"),
             "Ignore these signals in this process; SIGTERM from its own parent ends it, with 0.\n\n"
             "Programs that it starts get the defaults. Raises RuntimeError for a signal that "
             "cannot be handled.");
}
