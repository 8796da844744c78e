// The whole of a call to LayerNorm or RMSNorm below its checks, and its autograd node, in C++.
//
// On a small tensor a call's time is the host's: a Python autograd.Function, tensors allocated from
// Python and arguments packed one by one cost more than torch's whole operator. Here they cost less.
// It is the same work as autograd.py and launch.py do where there is no C++ compiler: same kernels,
// same bits. hfai/kernels/extension.py compiles this file on the user's machine against the torch
// that is installed there, in the background and once, so that no wheel depends on torch's C++ ABI.
//
// A `Call` holds what one configuration needs. Programs (compiled kernels) are asked of Python the
// first time they are needed and then kept.

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/custom_function.h>

#include <atomic>
#include <memory>
#include <vector>

#include "native/node.hpp"

namespace {

using namespace hfai;
using torch::autograd::variable_list;

// One program as Python describes it (`description` in programs.py): numbers in a fixed order.
struct Program {
  std::atomic<bool> made{false};
  PyObject *owner = nullptr;
  int64_t kind;
  int64_t numbers[4];
  Kernel kernels[3];
};
constexpr int64_t kForward = 0, kResident = 1, kFewRows = 2, kLong = 3;

struct Call {
  PyObject *configuration;      // programs.Configuration
  PyObject *watched_backward;   // autograd.watched_backward
  int device;                   // -1: the host, with functions in place of kernels, in tests
  int64_t row_length;
  int64_t few_rows;
  bool has_weight, has_bias, centered;
  at::ScalarType x_type, y_type, affine_type;
  std::vector<int64_t> shape;
  Program forward[4];
  Program backward[32];
  ~Call() {
    Py_XDECREF(configuration);
    Py_XDECREF(watched_backward);
  }
};

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Ask Python for `configuration.<method>(*flags).description()` and keep the answer.
void make(Program &program, PyObject *configuration, const char *method, int flags, int count) {
  WithGil gil;
  if (program.made.load(std::memory_order_relaxed)) return;
  Reference arguments(PyTuple_New(count));
  for (int i = 0; i < count; ++i)
    PyTuple_SET_ITEM(arguments.object, i, PyBool_FromLong(flags >> i & 1));
  Reference function(PyObject_GetAttrString(configuration, method));
  Reference made(PyObject_CallObject(function.object, arguments.object));
  // Compiling lets other threads run, and one of them may have been here in the meantime.
  if (program.made.load(std::memory_order_relaxed)) return;
  Reference description(PyObject_CallMethod(made.object, "description", nullptr));
  constexpr Py_ssize_t per_kernel = 6;
  constexpr Py_ssize_t length = 5 + 3 * per_kernel;
  int64_t numbers[length] = {};
  const Py_ssize_t given = PyTuple_Size(description.object);
  if (given < 5 || given > length)
    throw std::runtime_error("a program's description has the wrong length");
  for (Py_ssize_t i = 0; i < given; ++i)
    numbers[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(description.object, i));
  if (PyErr_Occurred()) {
    python_error error;
    error.persist();
    throw error;
  }
  program.kind = numbers[0];
  std::copy(numbers + 1, numbers + 5, program.numbers);
  for (int k = 0; k < 3; ++k) {
    const int64_t *n = numbers + 5 + k * per_kernel;
    program.kernels[k] = {static_cast<uintptr_t>(n[0]), static_cast<int>(n[1]),
                          static_cast<unsigned>(n[2]),  static_cast<unsigned>(n[3]),
                          static_cast<unsigned>(n[4]),  n[5] != 0};
  }
  program.owner = Py_NewRef(made.object);  // a kernel lives as long as Python's object for it
  program.made.store(true, std::memory_order_release);
}

template <class... Pointers>
bool all_aligned(Pointers... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) | ...) & 15) == 0;
}

// The rows' statistics are [mean and] 1/standard deviation, each of `rows` fp32 numbers.
std::pair<char *, char *> mean_and_rstd(const Call &call, const Tensor &statistics, int64_t rows) {
  char *mean = address(statistics);
  return {mean, mean && call.centered ? mean + 4 * rows : mean};
}

// y, and the statistics where they are wanted. x is dense and not empty, on the current device.
Tensor run_forward(Call &call, const Tensor &x, const Tensor &weight, const Tensor &bias,
                   double eps, Tensor *statistics) {
  const int64_t rows = x.numel() / call.row_length;
  Tensor y = call.x_type == call.y_type
                 ? at::empty_like(x)
                 : at::empty_like(x, x.options().dtype(call.y_type));
  if (statistics)
    *statistics = at::empty({1 + call.centered, rows}, x.options().dtype(at::kFloat));
  char *const px = address(x), *const py = address(y);
  char *const pw = address(weight), *const pb = address(bias);
  const auto [mean, rstd] = mean_and_rstd(call, statistics ? *statistics : Tensor(), rows);
  const bool aligned = all_aligned(px, py, pw, pb);
  const int flags = aligned | (rows <= call.few_rows) << 1;
  Program &program = call.forward[flags];
  if (!program.made.load(std::memory_order_acquire))
    make(program, call.configuration, "forward", flags, 2);
  const Kernel &kernel = program.kernels[0];
  const int64_t grid = divide_up(rows, program.numbers[0]) * kernel.cluster;
  launch(kernel, grid, current_stream(call.device), px, pw, pb, py, mean, rstd,
         static_cast<float>(eps), static_cast<long long>(rows));
  return y;
}

struct Gradients {
  Tensor x, weight, bias;
};

Tensor affine_gradient(const Call &call, const Tensor &x, const Tensor &weight) {
  return weight.defined() ? at::empty_like(weight)
                          : at::empty(call.shape, x.options().dtype(call.affine_type));
}

Gradients run_backward(Call &call, const Tensor &dy, const Tensor &x, const Tensor &weight,
                       const Tensor &statistics, bool need_x, bool need_weight, bool need_bias) {
  const int64_t rows = x.numel() / call.row_length;
  Gradients gradients;
  if (need_x) gradients.x = at::empty_like(x);
  if (need_weight) gradients.weight = affine_gradient(call, x, weight);
  if (need_bias) gradients.bias = affine_gradient(call, x, weight);
  char *const px = address(x), *const pdy = address(dy), *const pdx = address(gradients.x);
  char *const pw = address(weight);
  char *const pdw = address(gradients.weight), *const pdb = address(gradients.bias);
  const auto [mean, rstd] = mean_and_rstd(call, statistics, rows);
  const int flags = all_aligned(px, pdy, pdx, pw) | (rows <= call.few_rows) << 1 | need_x << 2 |
                    need_weight << 3 | need_bias << 4;
  Program &program = call.backward[flags];
  if (!program.made.load(std::memory_order_acquire))
    make(program, call.configuration, "backward", flags, 5);
  void *const stream = current_stream(call.device);
  const long long row_count = rows;
  const int64_t *numbers = program.numbers;
  if (program.kind == kFewRows) {
    const Kernel &kernel = program.kernels[0];
    int64_t clusters = divide_up(numbers[1], kernel.cluster);
    if (need_x) clusters += divide_up(rows, numbers[0]);
    launch(kernel, clusters * kernel.cluster, stream, pdy, px, pw, mean, rstd, pdx, pdw, pdb,
           row_count);
    return gradients;
  }
  const int64_t sums = need_weight + need_bias;
  const int64_t groups =
      program.kind == kResident
          ? std::min(numbers[1], divide_up(rows, numbers[0]))
          : std::max<int64_t>(1, std::min(numbers[1], rows / numbers[0]));
  Tensor scratch;
  char *first = nullptr, *second = nullptr;  // the groups' sums for dweight, if needed, and dbias
  if (sums) {
    scratch = at::empty({sums, groups, call.row_length}, x.options().dtype(at::kFloat));
    first = address(scratch);
    second = first + 4 * groups * call.row_length * (sums - 1);
  }
  if (program.kind == kResident) {
    const Kernel &kernel = program.kernels[0];
    launch(kernel, groups * kernel.cluster, stream, pdy, px, pw, mean, rstd, pdx, first, second,
           row_count);
  } else {
    if (need_x) launch(program.kernels[0], rows, stream, pdy, px, pw, mean, rstd, pdx, row_count);
    if (sums)
      launch(program.kernels[2], numbers[2] * groups, stream, pdy, px, mean, rstd, first, second,
             row_count, static_cast<long long>(groups));
  }
  if (sums)
    launch(program.kernels[1], divide_up(call.row_length, 32) * sums, stream, first, second,
           pdw ? pdw : pdb, pdb ? pdb : pdw, static_cast<long long>(call.row_length),
           static_cast<long long>(groups));
  return gradients;
}

// The gradients through torch's own operators, differentiable themselves.
Gradients run_watched_backward(const Call &call, double eps, const Tensor &dy, const Tensor &x,
                               const Tensor &weight, bool need_x, bool need_weight,
                               bool need_bias) {
  WithGil gil;
  Reference py_eps(PyFloat_FromDouble(eps));
  Reference py_dy(THPVariable_Wrap(dy)), py_x(THPVariable_Wrap(x));
  Reference py_weight(THPVariable_Wrap(weight));  // None where it is undefined
  Reference result(PyObject_CallFunctionObjArgs(
      call.watched_backward, call.configuration, py_eps.object, py_dy.object, py_x.object,
      py_weight.object, need_x ? Py_True : Py_False, need_weight ? Py_True : Py_False,
      need_bias ? Py_True : Py_False, nullptr));
  return {unwrapped(result.object, 0), unwrapped(result.object, 1), unwrapped(result.object, 2)};
}

c10::Device device_of(const Call &call) {
  if (call.device < 0) return c10::Device(c10::kCPU);
  return c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(call.device));
}

// Whether what saved-tensor hooks gave back is what was saved. They may choose other strides, and
// those that break the rest of torch's contract are to meet torch's own checks, not a kernel.
bool is_as_saved(const Call &call, const Tensor &dy, const Tensor &x, const Tensor &weight,
                 const Tensor &statistics) {
  const auto is = [&](const Tensor &tensor, at::ScalarType type) {
    return tensor.defined() && is_plain(tensor) && tensor.scalar_type() == type &&
           tensor.device() == device_of(call);
  };
  return is(x, call.x_type) && x.sizes() == dy.sizes() && dy.scalar_type() == call.y_type &&
         weight.defined() == call.has_weight &&
         (!call.has_weight || (is(weight, call.affine_type) && weight.sizes() == call.shape)) &&
         is(statistics, at::kFloat) &&
         statistics.numel() * call.row_length == (1 + call.centered) * x.numel();
}

struct Normalise : torch::autograd::Function<Normalise> {
  static Tensor forward(torch::autograd::AutogradContext *context, const Tensor &x,
                        const std::optional<Tensor> &optional_weight,
                        const std::optional<Tensor> &optional_bias, int64_t call_address,
                        double eps) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const Tensor weight = optional_weight.value_or(Tensor());
    const Tensor bias = optional_bias.value_or(Tensor());
    Tensor statistics;
    Call &call = *reinterpret_cast<Call *>(call_address);
    Tensor y = run_forward(call, x, weight, bias, eps, &statistics);
    context->save_for_backward({x, weight, statistics});
    context->saved_data["call"] = call_address;
    context->saved_data["eps"] = eps;
    context->set_materialize_grads(false);
    return y;
  }

  static variable_list backward(torch::autograd::AutogradContext *context, variable_list grads) {
    variable_list result(5);
    if (!grads[0].defined()) return result;
    Call &call = *reinterpret_cast<Call *>(context->saved_data["call"].toInt());
    const double eps = context->saved_data["eps"].toDouble();
    const variable_list saved = context->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1], &statistics = saved[2];
    const bool need_x = context->needs_input_grad(0);
    // Edges are counted over the tensors that there are.
    const bool need_weight = call.has_weight && context->needs_input_grad(1);
    const bool need_bias = call.has_bias && context->needs_input_grad(1 + call.has_weight);
    Gradients gradients;
    const Tensor dy = grads[0].is_neg() ? grads[0].resolve_neg() : grads[0];
    if (c10::GradMode::is_enabled() || !may_launch(dy) ||
        !is_as_saved(call, dy, x, weight, statistics)) {
      gradients = run_watched_backward(call, eps, dy, x, weight, need_x, need_weight, need_bias);
    } else {
      at::AutoDispatchBelowADInplaceOrView guard;
      const c10::DeviceGuard device(device_of(call));
      gradients = run_backward(call, dy.contiguous(), x.contiguous(),
                               weight.defined() ? weight.contiguous() : weight,
                               statistics.contiguous(), need_x, need_weight, need_bias);
    }
    result[0] = std::move(gradients.x);
    result[1] = std::move(gradients.weight);
    result[2] = std::move(gradients.bias);
    return result;
  }
};

constexpr const char *kCapsule = "hfai.kernels.layer_norm.Call";

Call *call_of(PyObject *capsule) {
  return static_cast<Call *>(PyCapsule_GetPointer(capsule, kCapsule));
}

// Whether shapes and layouts are what the kernels take (`fits` in autograd.py asks the same).
bool affine_fits(const Call &call, const Tensor &affine) {
  return !affine.defined() || (is_plain(affine) && affine.sizes() == call.shape &&
                               affine.device() == device_of(call) && affine.is_contiguous());
}

bool x_fits(const Call &call, const Tensor &x) {
  const size_t dimensions = call.shape.size();
  return is_plain(x) && x.sizes().size() >= dimensions &&
         x.sizes().slice(x.sizes().size() - dimensions) == call.shape && x.numel() != 0;
}

// y, or an undefined tensor where the call is torch's.
Tensor run(Call &call, const Tensor &given, const Tensor &weight, const Tensor &bias, double eps) {
  Tensor x = given.is_neg() ? given.resolve_neg() : given;
  if (!x_fits(call, x) || !affine_fits(call, weight) || !affine_fits(call, bias)) return Tensor();
  const c10::DeviceGuard device(device_of(call));
  x = x.contiguous();
  const auto needs = [](const Tensor &t) { return t.defined() && t.requires_grad(); };
  if (!c10::GradMode::is_enabled() || !(needs(x) || needs(weight) || needs(bias)))
    return run_forward(call, x, weight, bias, eps, nullptr);
  const auto optional = [](const Tensor &t) {
    return t.defined() ? std::optional<Tensor>(t) : std::nullopt;
  };
  return Normalise::apply(x, optional(weight), optional(bias), reinterpret_cast<int64_t>(&call),
                          eps);
}

// normalise(call, x, weight, bias, eps) -> y, or None where a tensor does not fit
PyObject *normalise(PyObject *, PyObject *const *arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 5) {
    PyErr_Format(PyExc_TypeError, "normalise takes 5 arguments, got %zd", count);
    return nullptr;
  }
  Call *call = call_of(arguments[0]);
  Tensor x, weight, bias;
  if (!call || !read_tensor(arguments[1], false, x) || !read_tensor(arguments[2], true, weight) ||
      !read_tensor(arguments[3], true, bias))
    return nullptr;
  const double eps = PyFloat_AsDouble(arguments[4]);
  if (eps == -1.0 && PyErr_Occurred()) return nullptr;
  Tensor y;
  {
    WithoutGil no_gil;
    y = run(*call, x, weight, bias, eps);
  }
  return THPVariable_Wrap(std::move(y));
  END_HANDLE_TH_ERRORS
}

// make_call(configuration, watched_backward, device, row_length, few_rows, has_weight, has_bias,
//           centered, x_dtype, y_dtype, affine_dtype or None, shape) -> call
PyObject *make_call(PyObject *, PyObject *arguments) {
  HANDLE_TH_ERRORS
  PyObject *configuration, *watched_backward, *x_type, *y_type, *affine_type, *shape;
  int device, has_weight, has_bias, centered;
  long long row_length, few_rows;
  if (!PyArg_ParseTuple(arguments, "OOiLLpppO!O!OO!", &configuration, &watched_backward, &device,
                        &row_length, &few_rows, &has_weight, &has_bias, &centered, &THPDtypeType,
                        &x_type, &THPDtypeType, &y_type, &affine_type, &PyTuple_Type, &shape))
    return nullptr;
  auto call = std::make_unique<Call>();
  call->configuration = Py_NewRef(configuration);
  call->watched_backward = Py_NewRef(watched_backward);
  call->device = device;
  call->row_length = row_length;
  call->few_rows = few_rows;
  call->has_weight = has_weight;
  call->has_bias = has_bias;
  call->centered = centered;
  const auto type_of = [](PyObject *dtype) {
    return reinterpret_cast<THPDtype *>(dtype)->scalar_type;
  };
  call->x_type = type_of(x_type);
  call->y_type = type_of(y_type);
  call->affine_type = THPDtype_Check(affine_type) ? type_of(affine_type) : at::kFloat;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(shape); ++i)
    call->shape.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(shape, i)));
  if (PyErr_Occurred()) return nullptr;
  // Never freed: a node of a graph may outlive whoever made the call, and there are few of them.
  return PyCapsule_New(call.release(), kCapsule, nullptr);
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    {"make_call", make_call, METH_VARARGS, "Prepare the calls of one configuration."},
    {"normalise", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(normalise)),
     METH_FASTCALL, "Normalise the rows of x, differentiably: (call, x, weight, bias, eps) -> y."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "node", "LayerNorm's call and autograd node.", -1,
                          methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_node() { return PyModule_Create(&definition); }
