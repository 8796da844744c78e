// Kernel launches at the driver's own cost.
//
// cuda-core's launch is written for generality and costs twice what the driver call does; for an
// operator on a small tensor that is the difference between slower and faster than torch. This
// module packs Python arguments into kernel parameters and calls cuLaunchKernelEx, nothing more.
// The driver is looked up at run time, so the module builds and imports without CUDA.

#include <dlfcn.h>
#include <nanobind/nanobind.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

namespace nb = nanobind;

namespace {

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

constexpr size_t kMaxArguments = 24;

void launch(uintptr_t kernel, int device, unsigned block, unsigned shared_bytes, unsigned cluster,
            bool overlap, unsigned grid, uintptr_t stream, nb::args arguments) {
  static const Driver driver;
  const size_t count = arguments.size();
  if (count > kMaxArguments) throw std::invalid_argument("too many kernel arguments");
  uint64_t storage[kMaxArguments];
  void *parameters[kMaxArguments];
  for (size_t i = 0; i < count; ++i) {
    PyObject *argument = PyTuple_GET_ITEM(arguments.ptr(), static_cast<Py_ssize_t>(i));
    parameters[i] = &storage[i];
    if (PyFloat_CheckExact(argument)) {
      const float value = static_cast<float>(PyFloat_AS_DOUBLE(argument));
      std::memcpy(&storage[i], &value, sizeof value);
    } else {
      storage[i] = PyLong_AsUnsignedLongLongMask(argument);
      if (PyErr_Occurred()) throw nb::python_error();
    }
  }
  driver.ensure_context(device);
  if (cluster <= 1 && !overlap) {
    driver.check(driver.launch_plain(reinterpret_cast<void *>(kernel), grid, 1, 1, block, 1, 1,
                                     shared_bytes, reinterpret_cast<void *>(stream), parameters,
                                     nullptr),
                 "kernel launch failed");
    return;
  }
  LaunchAttribute attributes[2]{};
  LaunchConfig config{grid, 1, 1, block, 1, 1, shared_bytes, reinterpret_cast<void *>(stream),
                      attributes, 0};
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
  driver.check(driver.launch(&config, reinterpret_cast<void *>(kernel), parameters, nullptr),
               "kernel launch failed");
}

}  // namespace

NB_MODULE(_launch, module) {
  module.doc() = "Kernel launches at the driver's own cost.";
  module.def("launch", &launch, nb::arg("kernel"), nb::arg("device"), nb::arg("block"),
             nb::arg("shared_bytes"), nb::arg("cluster"), nb::arg("overlap"), nb::arg("grid"),
             nb::arg("stream"), nb::arg("arguments"),
             "Launch a CUfunction or CUkernel handle on a stream of `device`'s primary context.\n\n"
             "Each Python int becomes an 8-byte kernel parameter (a pointer or a long long), each "
             "float a 4-byte one. Raises RuntimeError with the driver's words.");
}
