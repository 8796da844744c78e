// NVIDIA's driver in little, for machines without it: a stream is a thread, the GPU's memory the
// host's. Built as libcuda.so.1, it runs hfreduce's own code for GPUs on a CPU, as many ranks as
// one likes. With -DNO_WORDS it lacks the words by which streams are steered, as old drivers do.
#include <sched.h>
#include <time.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace {

constexpr int kSuccess = 0, kNotReady = 600;

class Stream {
 public:
  Stream() : thread_([this] { serve(); }) { thread_.detach(); }
  void push(std::function<void()> job) {
    std::lock_guard<std::mutex> lock(mutex_);
    jobs_.push_back(std::move(job));
    ++left_;
    changed_.notify_all();
  }
  void synchronize() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return left_ == 0; });
  }

 private:
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return !jobs_.empty(); });
      auto job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      job();
      lock.lock();
      --left_;
      changed_.notify_all();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;
  int left_ = 0;
  std::thread thread_;
};

std::atomic<double> held_until{0};  // seconds of the monotonic clock: copies to the GPU wait, for tests

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec / 1e9;
}

using Event = std::atomic<int>;  // how often it was recorded and has not come

}  // namespace

extern "C" {

int cuInit(unsigned) { return kSuccess; }
int cuGetErrorString(int, const char **text) { return *text = "an error of the driver", kSuccess; }
int cuDevicePrimaryCtxRetain(void **context, int device) {
  *context = reinterpret_cast<void *>(static_cast<intptr_t>(device) + 1);
  return kSuccess;
}
int cuDevicePrimaryCtxRelease_v2(int) { return kSuccess; }
int cuCtxPushCurrent_v2(void *) { return kSuccess; }
int cuCtxPopCurrent_v2(void **) { return kSuccess; }

int cuMemHostRegister_v2(void *, size_t, unsigned) { return kSuccess; }
int cuMemHostUnregister(void *) { return kSuccess; }
int cuMemHostAlloc(void **memory, size_t size, unsigned) {
  *memory = std::aligned_alloc(4096, (size + 4095) / 4096 * 4096);
  return kSuccess;
}
int cuMemFreeHost(void *memory) { return std::free(memory), kSuccess; }
int cuMemHostGetDevicePointer_v2(uint64_t *device, void *host, unsigned) {
  *device = reinterpret_cast<uint64_t>(host);
  return kSuccess;
}

int cuStreamCreate(Stream **stream, unsigned) { return *stream = new Stream, kSuccess; }
int cuStreamSynchronize(Stream *stream) { return stream->synchronize(), kSuccess; }
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t size, Stream *stream) {
  stream->push([=] { std::memcpy(to, reinterpret_cast<void *>(from), size); });
  return kSuccess;
}
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t size, Stream *stream) {
  stream->push([=] {
    while (now() < held_until) sched_yield();
    std::memcpy(reinterpret_cast<void *>(to), from, size);
  });
  return kSuccess;
}
void hold_copies_to_the_gpu(double seconds) { held_until = now() + seconds; }

int cuEventCreate(Event **event, unsigned) { return *event = new Event{0}, kSuccess; }
int cuEventDestroy_v2(Event *event) { return delete event, kSuccess; }
int cuEventRecord(Event *event, Stream *stream) {
  ++*event;
  stream->push([=] { --*event; });
  return kSuccess;
}
int cuEventQuery(Event *event) { return *event ? kNotReady : kSuccess; }

#ifndef NO_WORDS
int cuStreamWriteValue32_v2(Stream *stream, uint64_t word, uint32_t value, unsigned) {
  stream->push([=] { reinterpret_cast<std::atomic<uint32_t> *>(word)->store(value); });
  return kSuccess;
}
int cuStreamWaitValue32_v2(Stream *stream, uint64_t word, uint32_t value, unsigned) {
  stream->push([=] {
    auto *seen = reinterpret_cast<std::atomic<uint32_t> *>(word);
    while (static_cast<int32_t>(seen->load() - value) < 0) sched_yield();
  });
  return kSuccess;
}
struct Operation {
  uint32_t kind, unused;
  uint64_t address, value, more[3];
};
int cuStreamBatchMemOp_v2(Stream *stream, unsigned count, Operation *operations, unsigned) {
  for (Operation *each = operations; each != operations + count; ++each)
    (each->kind == 1 ? cuStreamWaitValue32_v2 : cuStreamWriteValue32_v2)(
        stream, each->address, static_cast<uint32_t>(each->value), 0);
  return kSuccess;
}
#endif

}  // extern "C"
