// What the C++ autograd nodes share: the interpreter's lock, Python references, torch's current stream,
// launches, and which tensors a kernel may read. Included by sources that hfai/kernels/extension.py
// compiles against the installed torch.
#pragma once

#include <ATen/core/Tensor.h>
#include <Python.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include "native/driver.hpp"

namespace hfai {

using at::Tensor;

struct WithoutGil {
  PyThreadState *state = PyEval_SaveThread();
  ~WithoutGil() { PyEval_RestoreThread(state); }
};

struct WithGil {
  PyGILState_STATE state = PyGILState_Ensure();
  ~WithGil() { PyGILState_Release(state); }
};

struct Reference {
  PyObject *object;
  explicit Reference(PyObject *stolen) : object(stolen) {
    if (object) return;
    python_error error;
    error.persist();
    throw error;
  }
  Reference(const Reference &) = delete;
  ~Reference() { Py_DECREF(object); }
};

inline void *current_stream(int device) {
  if (device < 0) return nullptr;
  using Function = int32_t (*)(int32_t, void **);
  static const Function function = [] {
    void *library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    void *symbol = library ? dlsym(library, "aoti_torch_get_current_cuda_stream") : nullptr;
    if (!symbol)
      throw std::runtime_error("torch's library has no aoti_torch_get_current_cuda_stream");
    return reinterpret_cast<Function>(symbol);
  }();
  void *stream = nullptr;
  if (function(device, &stream) != 0) throw std::runtime_error("torch names no current stream");
  return stream;
}

template <class... Arguments>
void launch(const Kernel &kernel, int64_t grid, void *stream, Arguments... arguments) {
  void *parameters[] = {&arguments...};
  if (kernel.device >= 0) {
    kernel.launch(static_cast<unsigned>(grid), stream, parameters);
  } else {
    reinterpret_cast<void (*)(int64_t, void **)>(kernel.function)(grid, parameters);
  }
}

inline char *address(const Tensor &tensor) {
  return tensor.defined() ? static_cast<char *>(const_cast<void *>(tensor.const_data_ptr()))
                          : nullptr;
}

// Whether a kernel may read a tensor: memory of its own, row by row. The keys are those of a plain
// tensor; everything else that torch builds on dispatch (nested and sparse tensors, functorch's, a
// sign kept aside as a bit) has another.
inline bool is_plain(const Tensor &tensor) {
  constexpr c10::DispatchKeySet plain({c10::DispatchKey::CPU, c10::DispatchKey::CUDA,
                                       c10::DispatchKey::ADInplaceOrView,
                                       c10::DispatchKey::AutogradCPU,
                                       c10::DispatchKey::AutogradCUDA,
                                       c10::DispatchKey::AutocastCPU,
                                       c10::DispatchKey::AutocastCUDA});
  return (tensor.key_set() | plain) == plain && tensor.layout() == at::kStrided;
}

// Whether a kernel may read dy in this backward pass: nothing watches torch's operators.
inline bool may_launch(const Tensor &dy) {
  constexpr c10::DispatchKeySet watching({c10::DispatchKey::Python,
                                          c10::DispatchKey::PythonDispatcher,
                                          c10::DispatchKey::Functionalize,
                                          c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                                          c10::DispatchKey::FuncTorchDynamicLayerBackMode});
  return is_plain(dy) &&
         (c10::impl::tls_local_dispatch_key_set().included_ & watching).empty() &&
         !dy._fw_grad(0).defined();
}

inline Tensor unwrapped(PyObject *sequence, Py_ssize_t index) {
  Reference item(PySequence_GetItem(sequence, index));
  return item.object == Py_None ? Tensor() : THPVariable_Unpack(item.object);
}

// Read a tensor, or None where that is allowed; false with a Python error set where it is neither.
// (Errors of ours are raised through Python and never as torch's exceptions: formatting a number into
// one has been seen to crash where this file's C++ library is newer than torch's.)
inline bool read_tensor(PyObject *object, bool or_none, Tensor &tensor) {
  if (object == Py_None && or_none) return true;
  if (!THPVariable_Check(object)) {
    PyErr_Format(PyExc_TypeError, "expected a tensor%s, got %s", or_none ? " or None" : "",
                 Py_TYPE(object)->tp_name);
    return false;
  }
  tensor = THPVariable_Unpack(object);
  return true;
}

}  // namespace hfai
