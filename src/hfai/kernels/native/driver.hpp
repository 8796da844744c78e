// Kernel launches through the CUDA driver, which is looked up at run time: what includes this
// builds and loads without CUDA.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace hfai {

// The parts of cuda.h that are used, with the layout that the driver's ABI fixes.
using CUresult = int;
constexpr CUresult kSuccess = 0;
constexpr int kAttributeClusterDimension = 4;
constexpr int kAttributeProgrammaticStreamSerialization = 6;
struct LaunchAttribute {
  int id;
  char padding[4];
  union {
    char bytes[64];
    struct {
      unsigned x, y, z;
    } cluster;
    int overlap;
  } value;
};
struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  void *stream;
  LaunchAttribute *attributes;
  unsigned attribute_count;
};

struct Driver {
  CUresult (*launch_plain)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                           unsigned, void *, void **, void **);
  CUresult (*launch)(const LaunchConfig *, void *, void **, void **);
  CUresult (*error_string)(CUresult, const char **);
  CUresult (*context_get)(void **);
  CUresult (*context_set)(void *);
  CUresult (*primary_context_retain)(void **, int);

  Driver() {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) throw std::runtime_error("libcuda.so.1 not found: is NVIDIA's driver installed?");
    find(library, "cuLaunchKernel", launch_plain);
    find(library, "cuLaunchKernelEx", launch);
    find(library, "cuGetErrorString", error_string);
    find(library, "cuCtxGetCurrent", context_get);
    find(library, "cuCtxSetCurrent", context_set);
    find(library, "cuDevicePrimaryCtxRetain", primary_context_retain);
  }

  template <class F>
  static void find(void *library, const char *name, F &function) {
    function = reinterpret_cast<F>(dlsym(library, name));
    if (!function)
      throw std::runtime_error(std::string("the NVIDIA driver is too old: it has no ") + name);
  }

  void check(CUresult result, const char *what) const {
    if (result == kSuccess) return;
    const char *text = nullptr;
    error_string(result, &text);
    throw std::runtime_error(std::string(what) + ": " + (text ? text : "unknown CUDA error") +
                             " (CUDA error " + std::to_string(result) + ")");
  }

  // A thread that has not called the CUDA runtime yet (autograd's own threads) has no context.
  void ensure_context(int device) const {
    void *context = nullptr;
    if (context_get(&context) == kSuccess && context) return;
    check(primary_context_retain(&context, device), "cuDevicePrimaryCtxRetain");
    check(context_set(context), "cuCtxSetCurrent");
  }
};

// A loaded kernel and all of its launch shape but the grid.
struct Kernel {
  uintptr_t function;  // a CUfunction or CUkernel handle
  int device;
  unsigned block, shared_bytes, cluster;
  bool overlap;  // may start before the kernel in front of it in the stream has ended

  // Enqueue on a stream of the device's primary context; throws std::runtime_error with the
  // driver's words.
  void launch(unsigned grid, void *stream, void **parameters) const {
    static const Driver driver;
    driver.ensure_context(device);
    void *handle = reinterpret_cast<void *>(function);
    if (cluster <= 1 && !overlap) {
      driver.check(driver.launch_plain(handle, grid, 1, 1, block, 1, 1, shared_bytes, stream,
                                       parameters, nullptr),
                   "kernel launch failed");
      return;
    }
    LaunchAttribute attributes[2]{};
    LaunchConfig config{grid, 1, 1, block, 1, 1, shared_bytes, stream, attributes, 0};
    if (cluster > 1) {
      LaunchAttribute &attribute = attributes[config.attribute_count++];
      attribute.id = kAttributeClusterDimension;
      attribute.value.cluster = {cluster, 1, 1};
    }
    if (overlap) {
      LaunchAttribute &attribute = attributes[config.attribute_count++];
      attribute.id = kAttributeProgrammaticStreamSerialization;
      attribute.value.overlap = 1;
    }
    driver.check(driver.launch(&config, handle, parameters, nullptr), "kernel launch failed");
  }
};

}  // namespace hfai
