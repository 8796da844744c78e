// The GPU's half of an all-reduce: two streams, and the words by which the host steers them.
//
// `out` copies a chunk of the tensor into this rank's slot and says so by writing a word, `back` waits
// for a word, copies the sum from slot 0 into the tensor and writes another:
//
//   allow    the host says: slots are free up to this chunk       (`out` waits for it)
//   arrived  `out` says: copied up to this chunk
//   go       the host says: the sums up to this chunk are whole   (`back` waits for it)
//   returned `back` says: copied up to this chunk
//
// For each chunk `out` is enqueued before `back`, and a wait of either depends only on what was
// enqueued before it, here and on other ranks in the same order. So nothing blocks for ever even
// where the driver maps both streams, or others, to one hardware queue.
//
// Where the driver has no such words, the host enqueues each copy when its turn has come, and asks
// events. That is correct everywhere and slower.
#pragma once

#include <cstring>
#include <memory>
#include <vector>

#include "cuda_driver.hpp"
#include "gpu_call.hpp"
#include "segment.hpp"

namespace hfreduce {

// Whether one number of a chunk is beyond another; they wrap around.
inline bool ahead(uint32_t a, uint32_t b) { return static_cast<int32_t>(a - b) > 0; }

class GpuStreams {
 public:
  // Pins the group's memory; throws a std::runtime_error in CUDA's words.
  GpuStreams(const Segment &segment, int rank, int device, bool words)
      : segment_(segment), driver_(CudaDriver::get()), device_(device), rank_(rank),
        chunk_bytes_(static_cast<int64_t>(segment.shape().slot_bytes)) {
    driver_.check(driver_.context_retain(&context_, device_), "cuDevicePrimaryCtxRetain");
    try {
      InContext current(context_);
      driver_.check(driver_.mem_host_register(segment_.base(), segment_.shape().bytes(),
                                              kHostRegisterPortable | kHostRegisterDeviceMap),
                    "cuMemHostRegister of the group's memory");
      registered_ = true;
      void *memory = nullptr;
      driver_.check(driver_.mem_host_alloc(&memory, sizeof(Words),
                                           kHostRegisterPortable | kHostRegisterDeviceMap),
                    "cuMemHostAlloc");
      std::memset(memory, 0, sizeof(Words));
      words_ = static_cast<Words *>(memory);
      driver_.check(driver_.mem_host_get_device_pointer(&words_on_device_, memory, 0),
                    "cuMemHostGetDevicePointer");
      out_ = Streams::take(context_);
      back_ = Streams::take(context_);
      by_words_ = words && driver_.stream_write && driver_.stream_wait && words_work();
      const int events = by_words_ ? 0 : 2 * segment_.shape().slots;
      for (int i = 0; i < events; ++i) {
        events_.push_back(nullptr);
        driver_.check(driver_.event_create(&events_.back(), kEventDisableTiming), "cuEventCreate");
      }
    } catch (...) {
      close();
      throw;
    }
  }
  GpuStreams(const GpuStreams &) = delete;
  ~GpuStreams() { close(); }

  bool by_words() const { return by_words_; }
  CUstream out() const { return out_; }
  CUstream back() const { return back_; }
  // Current in a thread that copies by events; nothing where words do.
  std::unique_ptr<InContext> for_events() const {
    return by_words_ ? nullptr : std::make_unique<InContext>(context_);
  }

  // Enqueues all of a call. The queues may be shorter than it: then the host must be serving it.
  void enqueue(const GpuCall &call) {
    if (!by_words_) return;
    InContext current(context_);
    const Cut cut(call, chunk_bytes_);
    for (int64_t i = 0; i < cut.chunks(); ++i) {
      const uint32_t number = call.first + static_cast<uint32_t>(i) + 1;
      // Mostly its slot is free already.
      if (ahead(number, segment_.least(&Progress::taken).value + slots()))
        wait_on(out_, offsetof(Words, allow), number);
      copy_out(call, cut, i);
      write_to(out_, offsetof(Words, arrived), number);
      if (i == 0)
        wait_on(back_, offsetof(Words, go), number);
      else
        write_and_wait(back_, offsetof(Words, returned), number - 1, offsetof(Words, go), number);
      copy_back(call, cut, i);
    }
    write_to(back_, offsetof(Words, returned), call.first + static_cast<uint32_t>(cut.chunks()));
  }

  // Lets a call's i-th chunk out, or the sum of it back; in order.
  void let_out(const GpuCall &call, int64_t i) {
    const uint32_t chunk = call.first + static_cast<uint32_t>(i);
    if (by_words_) {
      words_->allow.value.store(chunk + 1, std::memory_order_release);
    } else {
      copy_out(call, Cut(call, chunk_bytes_), i);
      driver_.check(driver_.event_record(event(chunk, false), out_), "cuEventRecord");
    }
  }
  void let_back(const GpuCall &call, int64_t i) {
    const uint32_t chunk = call.first + static_cast<uint32_t>(i);
    if (by_words_) {
      words_->go.value.store(chunk + 1, std::memory_order_release);
    } else {
      copy_back(call, Cut(call, chunk_bytes_), i);
      driver_.check(driver_.event_record(event(chunk, true), back_), "cuEventRecord");
    }
  }

  // How far `out` or `back` is, between how far it was known to be and how far it was let.
  uint32_t arrived(uint32_t before, uint32_t let) const {
    return by_words_ ? within(before, words_->arrived, let) : asked(before, let, false);
  }
  uint32_t returned(uint32_t before, uint32_t let) const {
    return by_words_ ? within(before, words_->returned, let) : asked(before, let, true);
  }

  // Lets everything before `end` run dry, with whatever lies in the slots.
  void let_go(uint32_t end) {
    words_->allow.value.store(end, std::memory_order_release);
    words_->go.value.store(end, std::memory_order_release);
  }

  // A forked child has no such streams: it must not touch them.
  void disown() { context_ = nullptr; }

  // Waits for the streams and unpins the memory. Nothing throws here: what a broken context still
  // holds goes with the process.
  void close() {
    if (!context_) return;
    CUcontext popped;
    if (driver_.context_push(context_) == kCudaSuccess) {
      if (out_) driver_.stream_synchronize(out_);
      if (back_) driver_.stream_synchronize(back_);
      for (CUevent event : events_)
        if (event) driver_.event_destroy(event);
      events_.clear();
      Streams::give(context_, out_);
      Streams::give(context_, back_);
      if (words_) driver_.mem_free_host(words_);
      if (registered_) driver_.mem_host_unregister(segment_.base());
      driver_.context_pop(&popped);
    }
    context_ = nullptr;
    driver_.context_release(device_);
  }

 private:
  struct Words {
    Word allow, arrived, go, returned;
  };

  uint32_t slots() const { return static_cast<uint32_t>(segment_.shape().slots); }

  void copy_out(const GpuCall &call, const Cut &cut, int64_t i) {
    const uint32_t chunk = call.first + static_cast<uint32_t>(i);
    if (const int64_t size = cut.size(i) * call.item())
      driver_.check(driver_.copy_to_host(segment_.slot(0, rank_, chunk), tensor_at(call, cut, i),
                                         static_cast<size_t>(size), out_),
                    "cuMemcpyDtoHAsync");
  }
  void copy_back(const GpuCall &call, const Cut &cut, int64_t i) {
    const uint32_t chunk = call.first + static_cast<uint32_t>(i);
    if (const int64_t size = cut.size(i) * call.item())
      driver_.check(driver_.copy_to_device(tensor_at(call, cut, i), segment_.slot(0, 0, chunk),
                                           static_cast<size_t>(size), back_),
                    "cuMemcpyHtoDAsync");
  }
  static CUdeviceptr tensor_at(const GpuCall &call, const Cut &cut, int64_t i) {
    return call.tensor + static_cast<uint64_t>(cut.begin(i) * call.item());
  }

  void wait_on(CUstream stream, size_t offset, uint32_t value) const {
    driver_.check(driver_.stream_wait(stream, words_on_device_ + offset, value, kWaitGreaterOrEqual),
                  "cuStreamWaitValue32");
  }
  void write_to(CUstream stream, size_t offset, uint32_t value) const {
    driver_.check(driver_.stream_write(stream, words_on_device_ + offset, value, kWriteDefault),
                  "cuStreamWriteValue32");
  }

  // In one call of the driver where it has one for both.
  void write_and_wait(CUstream stream, size_t written, uint32_t value, size_t awaited,
                      uint32_t least) const {
    if (!driver_.stream_operations) {
      write_to(stream, written, value);
      wait_on(stream, awaited, least);
      return;
    }
    StreamOperation both[2] = {{kWriteValue32, 0, words_on_device_ + written, value, kWriteDefault},
                               {kWaitValue32, 0, words_on_device_ + awaited, least,
                                kWaitGreaterOrEqual}};
    driver_.check(driver_.stream_operations(stream, 2, both, 0), "cuStreamBatchMemOp");
  }

  // A value goes to the device and back, once.
  bool words_work() {
    const CUresult waits =
        driver_.stream_wait(out_, words_on_device_ + offsetof(Words, allow), 0, kWaitGreaterOrEqual);
    const CUresult writes =
        driver_.stream_write(out_, words_on_device_ + offsetof(Words, arrived), 1, kWriteDefault);
    if (waits != kCudaSuccess || writes != kCudaSuccess) return false;
    driver_.check(driver_.stream_synchronize(out_), "cuStreamSynchronize");
    const bool came = words_->arrived.value.load() == 1;
    words_->arrived.value.store(0);
    return came;
  }

  // The word of a stream that has done nothing in this call yet still has an earlier call's value.
  static uint32_t within(uint32_t before, const Word &word, uint32_t let) {
    const uint32_t value = word.value.load(std::memory_order_acquire);
    return ahead(value, before) && !ahead(value, let) ? value : before;
  }
  uint32_t asked(uint32_t before, uint32_t let, bool back) const {
    while (before != let) {
      const CUresult result = driver_.event_query(event(before, back));
      if (result == kCudaNotReady) break;
      driver_.check(result, "cuEventQuery");
      ++before;
    }
    return before;
  }
  CUevent event(uint32_t chunk, bool back) const {
    const size_t slots = static_cast<size_t>(segment_.shape().slots);
    return events_[(back ? slots : 0) + chunk % slots];
  }

  const Segment &segment_;
  const CudaDriver &driver_;
  const CUdevice device_;
  const int rank_;
  const int64_t chunk_bytes_;
  CUcontext context_ = nullptr;
  bool registered_ = false, by_words_ = false;
  Words *words_ = nullptr;  // of this process alone
  CUdeviceptr words_on_device_ = 0;
  CUstream out_ = nullptr, back_ = nullptr;
  std::vector<CUevent> events_;
};

}  // namespace hfreduce
