// Kernel launches at the driver's own cost.
//
// cuda-core's launch is written for generality and costs twice what the driver call does; for an
// operator on a small tensor that is the difference between slower and faster than torch. This
// module packs Python arguments into kernel parameters and calls cuLaunchKernelEx, nothing more.

#include <nanobind/nanobind.h>

#include <cstring>

#include "driver.hpp"

namespace nb = nanobind;

namespace {

constexpr size_t kMaxArguments = 64;

void launch(uintptr_t kernel, int device, unsigned block, unsigned shared_bytes, unsigned cluster,
            bool overlap, unsigned grid, uintptr_t stream, nb::args arguments) {
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
  // The driver waits where its queue is full, and what empties it may need the interpreter.
  nb::gil_scoped_release no_gil;
  hfai::Kernel{kernel, device, block, shared_bytes, cluster, overlap}.launch(
      grid, reinterpret_cast<void *>(stream), parameters);
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
