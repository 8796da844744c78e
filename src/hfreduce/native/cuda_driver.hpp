// The few calls of the CUDA driver that moving needs, found at run time.
//
// Nothing here launches a kernel: copies go through the copy engines, and 32-bit values are written
// and waited for by the streams themselves.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace hfreduce {

// The parts of cuda.h that are used, as the driver's ABI fixes them.
using CUresult = int;
using CUdevice = int;
using CUcontext = void *;
using CUstream = void *;
using CUevent = void *;
using CUdeviceptr = uint64_t;
constexpr CUresult kCudaSuccess = 0, kCudaNotReady = 600;
constexpr unsigned kHostRegisterPortable = 1, kHostRegisterDeviceMap = 2;
constexpr unsigned kStreamNonBlocking = 1, kEventDisableTiming = 2;
constexpr unsigned kWaitGreaterOrEqual = 0, kWriteDefault = 0;
// One operation of cuStreamBatchMemOp, for 32-bit values.
struct StreamOperation {
  uint32_t kind, unused = 0;
  CUdeviceptr address;
  uint64_t value;
  uint32_t flags = 0, unused_too = 0;
  CUdeviceptr alias = 0;
  uint64_t more = 0;
};
static_assert(sizeof(StreamOperation) == 48, "six words of 64 bits, by the driver's ABI");
constexpr uint32_t kWaitValue32 = 1, kWriteValue32 = 2;
// CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1 speaks of the interface before CUDA 12, which an
// administrator had to switch on; the functions ending in _v2 need no switch where they are.

class CudaDriver {
 public:
  CUresult (*mem_host_register)(void *, size_t, unsigned);
  CUresult (*mem_host_unregister)(void *);
  CUresult (*mem_host_get_device_pointer)(CUdeviceptr *, void *, unsigned);
  CUresult (*mem_host_alloc)(void **, size_t, unsigned);
  CUresult (*mem_free_host)(void *);
  CUresult (*copy_to_host)(void *, CUdeviceptr, size_t, CUstream);
  CUresult (*copy_to_device)(CUdeviceptr, const void *, size_t, CUstream);
  CUresult (*stream_create)(CUstream *, unsigned);
  CUresult (*stream_synchronize)(CUstream);
  CUresult (*event_create)(CUevent *, unsigned);
  CUresult (*event_destroy)(CUevent);
  CUresult (*event_record)(CUevent, CUstream);
  CUresult (*event_query)(CUevent);
  CUresult (*context_retain)(CUcontext *, CUdevice);
  CUresult (*context_release)(CUdevice);
  CUresult (*context_push)(CUcontext);
  CUresult (*context_pop)(CUcontext *);
  CUresult (*error_string)(CUresult, const char **);
  // Null where the driver is older than CUDA 11.7.
  CUresult (*stream_write)(CUstream, CUdeviceptr, uint32_t, unsigned);
  CUresult (*stream_wait)(CUstream, CUdeviceptr, uint32_t, unsigned);
  CUresult (*stream_operations)(CUstream, unsigned, StreamOperation *, unsigned);

  static const CudaDriver &get() {
    static const CudaDriver driver;
    return driver;
  }

  void check(CUresult result, const char *what) const {
    if (result == kCudaSuccess) return;
    const char *text = nullptr;
    error_string(result, &text);
    throw std::runtime_error(std::string(what) + ": " + (text ? text : "unknown CUDA error") +
                             " (CUDA error " + std::to_string(result) + ")");
  }

 private:
  CudaDriver() {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) throw std::runtime_error("libcuda.so.1 not found: is NVIDIA's driver installed?");
    find(library, "cuMemHostRegister_v2", mem_host_register);
    find(library, "cuMemHostUnregister", mem_host_unregister);
    find(library, "cuMemHostGetDevicePointer_v2", mem_host_get_device_pointer);
    find(library, "cuMemHostAlloc", mem_host_alloc);
    find(library, "cuMemFreeHost", mem_free_host);
    find(library, "cuMemcpyDtoHAsync_v2", copy_to_host);
    find(library, "cuMemcpyHtoDAsync_v2", copy_to_device);
    find(library, "cuStreamCreate", stream_create);
    find(library, "cuStreamSynchronize", stream_synchronize);
    find(library, "cuEventCreate", event_create);
    find(library, "cuEventDestroy_v2", event_destroy);
    find(library, "cuEventRecord", event_record);
    find(library, "cuEventQuery", event_query);
    find(library, "cuDevicePrimaryCtxRetain", context_retain);
    find(library, "cuDevicePrimaryCtxRelease_v2", context_release);
    find(library, "cuCtxPushCurrent_v2", context_push);
    find(library, "cuCtxPopCurrent_v2", context_pop);
    find(library, "cuGetErrorString", error_string);
    find(library, "cuStreamWriteValue32_v2", stream_write, true);
    find(library, "cuStreamWaitValue32_v2", stream_wait, true);
    find(library, "cuStreamBatchMemOp_v2", stream_operations, true);
    CUresult (*initialise)(unsigned);
    find(library, "cuInit", initialise);
    check(initialise(0), "cuInit");
  }

  template <class F>
  static void find(void *library, const char *name, F &function, bool optional = false) {
    function = reinterpret_cast<F>(dlsym(library, name));
    if (!function && !optional)
      throw std::runtime_error(std::string("the NVIDIA driver is too old: it has no ") + name);
  }
};

// Makes a context current while it stands.
class InContext {
 public:
  explicit InContext(CUcontext context) {
    CudaDriver::get().check(CudaDriver::get().context_push(context), "cuCtxPushCurrent");
  }
  InContext(const InContext &) = delete;
  ~InContext() {
    CUcontext popped;
    CudaDriver::get().context_pop(&popped);
  }
};

// The streams that groups use, one group after another. None is ever destroyed: torch may come back to
// one after its group is closed, with an event of a future or for a tensor that is freed then, and
// the driver crashes where a stream is gone.
class Streams {
 public:
  // Returns an idle stream of a context, which is current.
  static CUstream take(CUcontext context) {
    Streams &all = get();
    {
      std::lock_guard<std::mutex> lock(all.mutex_);
      auto &idle = all.idle_[context];
      if (!idle.empty()) {
        CUstream stream = idle.back();
        idle.pop_back();
        return stream;
      }
    }
    CUstream stream = nullptr;
    const CudaDriver &driver = CudaDriver::get();
    driver.check(driver.stream_create(&stream, kStreamNonBlocking), "cuStreamCreate");
    return stream;
  }
  static void give(CUcontext context, CUstream stream) {
    if (!stream) return;
    Streams &all = get();
    std::lock_guard<std::mutex> lock(all.mutex_);
    all.idle_[context].push_back(stream);
  }

 private:
  static Streams &get() {
    static Streams *const all = new Streams;  // outlives whoever gives back at the process's end
    return *all;
  }
  std::mutex mutex_;
  std::map<CUcontext, std::vector<CUstream>> idle_;
};

}  // namespace hfreduce
