// Threads that carry one call together, each over its own part of every tensor and its own slots.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace hfreduce {

// The caller is lane 0; the others start on the first call that uses them and live until the end.
class Lanes {
 public:
  explicit Lanes(int count) : count_(count) {}
  Lanes(const Lanes &) = delete;
  ~Lanes() { end(); }

  // Calls work(lane) for every lane at once and returns when all have returned; throws a
  // std::system_error where there are no threads to be had.
  void run(const std::function<void(int)> &work) {
    if (threads_.empty()) start();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      work_ = &work;
      running_ = count_ - 1;
      ++round_;
    }
    started_.notify_all();
    work(0);
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.wait(lock, [&] { return running_ == 0; });
    work_ = nullptr;
  }

 private:
  void start() {
    // Signals go to Python's main thread, which can act on them.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      for (int lane = 1; lane < count_; ++lane)
        threads_.emplace_back([this, lane, round = round_] { serve(lane, round); });
    } catch (...) {  // all or none: a call waits for every lane
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      end();
      throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void end() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ending_ = true;
    }
    started_.notify_all();
    for (auto &thread : threads_) thread.join();
    threads_.clear();
    ending_ = false;
  }

  void serve(int lane, uint64_t seen) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      started_.wait(lock, [&] { return ending_ || round_ != seen; });
      if (ending_) return;
      seen = round_;
      const auto *work = work_;
      lock.unlock();
      (*work)(lane);
      lock.lock();
      if (--running_ == 0) finished_.notify_all();
    }
  }

  const int count_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable started_, finished_;
  const std::function<void(int)> *work_ = nullptr;
  int running_ = 0;
  uint64_t round_ = 0;
  bool ending_ = false;
};

}  // namespace hfreduce
