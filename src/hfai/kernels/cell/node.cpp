// The whole of a step of LSTMCell, GRUCell or RNNCell below its checks, and its autograd node, in C++.
//
// torch's step is five to nine operators, each with a node of its own, and on the sizes that people
// run cells with a step's time is the host's. Here it is one node: torch's own matrix products, and a
// kernel for the rest. It is the same work as autograd.py and launch.py do where there is no C++
// compiler: same kernels, same bits.

#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/custom_function.h>

#include <memory>

#include "native/node.hpp"

namespace {

using namespace hfai;
using torch::autograd::variable_list;

struct Call {
  PyObject *configuration;     // programs.Configuration; keeps the kernels
  PyObject *watched_backward;  // autograd.watched_backward
  int device;                  // -1: the host, with functions in place of kernels, in tests
  int64_t gates, kept;
  bool has_c;
  at::ScalarType type;
  int64_t units, group_rows, threads;  // of cell.cu
  Kernel forward, backward, add_sums;

  bool is_gru() const { return gates == 3; }
  ~Call() {
    Py_XDECREF(configuration);
    Py_XDECREF(watched_backward);
  }
};

// Undefined: c but for LSTM, and the biases of a cell without.
struct Operands {
  Tensor x, h, c, w_ih, w_hh, b_ih, b_hh;
};

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

c10::Device device_of(const Call &call) {
  if (call.device < 0) return c10::Device(c10::kCPU);
  return c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(call.device));
}

bool is_of(const Call &call, const Tensor &tensor) {
  return is_plain(tensor) && tensor.scalar_type() == call.type && tensor.device() == device_of(call);
}

// Whether shapes, types and layouts are what the kernels take (`fits` in autograd.py asks the same).
bool fits(const Call &call, const Operands &o) {
  if (!is_of(call, o.x) || !is_of(call, o.h) || o.x.dim() != 2 || o.h.dim() != 2) return false;
  const int64_t batch = o.x.size(0), inputs = o.x.size(1), hidden = o.h.size(1);
  if (batch == 0 || inputs == 0 || hidden == 0 || o.h.size(0) != batch) return false;
  const int64_t rows = call.gates * hidden;
  const auto is_matrix = [&](const Tensor &t, int64_t first, int64_t second) {
    return is_of(call, t) && t.dim() == 2 && t.size(0) == first && t.size(1) == second;
  };
  const auto is_bias = [&](const Tensor &t) {
    return !t.defined() || (is_of(call, t) && t.dim() == 1 && t.size(0) == rows);
  };
  return o.c.defined() == call.has_c &&
         (!call.has_c || is_matrix(o.c, batch, hidden)) && is_matrix(o.w_ih, rows, inputs) &&
         is_matrix(o.w_hh, rows, hidden) && o.b_ih.defined() == o.b_hh.defined() &&
         is_bias(o.b_ih) && is_bias(o.b_hh);
}

Tensor dense(const Tensor &tensor) { return tensor.defined() ? tensor.contiguous() : tensor; }

struct Made {
  Tensor h, c, from_input, from_hidden;
};

// All operands are dense, on the current device.
Made run_forward(const Call &call, const Operands &o, bool keep) {
  Made made;
  made.from_input = at::mm(o.x, o.w_ih.t());
  made.from_hidden = at::mm(o.h, o.w_hh.t());
  made.h = at::empty_like(o.h);
  if (call.has_c) made.c = at::empty_like(o.c);
  const long long batch = o.h.size(0), hidden = o.h.size(1);
  launch(call.forward, divide_up(batch * hidden, call.threads), current_stream(call.device),
         address(made.from_input), address(made.from_hidden), address(o.b_ih), address(o.b_hh),
         address(o.h), address(o.c), address(made.h), address(made.c), batch, hidden,
         static_cast<long long>(keep));
  return made;
}

// What a backward pass has beside the operands: the products' buffers as forward left them (GRU both)
// and LSTM's c, RNN's h after the step.
struct Kept {
  Tensor input, hidden, after;
};

using Needed = std::array<bool, 7>;  // as `Operands`

Operands run_backward(const Call &call, const Tensor &dh, const Tensor &dc, const Operands &o,
                      const Kept &kept, const Needed &need) {
  const long long batch = o.h.size(0), hidden = o.h.size(1);
  const Tensor d_input = at::empty_like(kept.input);
  const Tensor d_hidden = call.is_gru() ? at::empty_like(kept.input) : d_input;
  const bool has_state = call.has_c || call.is_gru();
  Tensor d_state, sums;
  if (has_state) d_state = at::empty_like(o.h);
  Operands result;
  const long long groups = divide_up(batch, call.group_rows);
  const bool need_biases = need[5] || need[6];
  if (need_biases) {
    result.b_ih = at::empty({call.gates * hidden}, o.x.options());
    result.b_hh = at::empty({call.gates * hidden}, o.x.options());
    if (groups > 1) sums = at::empty({groups, call.kept * hidden}, o.x.options().dtype(at::kFloat));
  }
  void *const stream = current_stream(call.device);
  launch(call.backward, divide_up(hidden, call.units) * groups, stream, address(kept.input),
         address(kept.hidden), address(call.has_c ? o.c : o.h), address(kept.after), address(dh),
         address(dc), address(d_input), address(d_hidden), address(d_state), address(sums),
         address(result.b_ih), address(result.b_hh), batch, hidden, groups);
  if (sums.defined())
    launch(call.add_sums, divide_up(call.kept * hidden, call.threads), stream, address(sums),
           address(result.b_ih), address(result.b_hh), hidden, groups);
  if (need[0]) result.x = at::mm(d_input, o.w_ih);
  if (need[1])
    result.h = call.is_gru() ? at::addmm(d_state, d_hidden, o.w_hh) : at::mm(d_hidden, o.w_hh);
  if (need[2]) result.c = d_state;
  if (need[3]) result.w_ih = at::mm(d_input.t(), o.x);
  if (need[4]) result.w_hh = at::mm(d_hidden.t(), o.h);
  if (!need[5]) result.b_ih = Tensor();
  if (!need[6]) result.b_hh = Tensor();
  return result;
}

// The gradients through torch's own operators, differentiable themselves.
Operands run_watched_backward(const Call &call, const Tensor &dh, const Tensor &dc,
                              const Operands &o, const Needed &need) {
  WithGil gil;
  Reference arguments(PyTuple_New(3 + 7 + 7));
  const auto set = [&](Py_ssize_t index, PyObject *stolen) {
    PyTuple_SET_ITEM(arguments.object, index, stolen);
  };
  set(0, Py_NewRef(call.configuration));
  Py_ssize_t index = 1;
  for (const Tensor *tensor : {&dh, &dc, &o.x, &o.h, &o.c, &o.w_ih, &o.w_hh, &o.b_ih, &o.b_hh})
    set(index++, THPVariable_Wrap(*tensor));  // None where it is undefined
  for (bool one : need) set(index++, PyBool_FromLong(one));
  Reference found(PyObject_CallObject(call.watched_backward, arguments.object));
  const auto at = [&](Py_ssize_t i) { return unwrapped(found.object, i); };
  return {at(0), at(1), at(2), at(3), at(4), at(5), at(6)};
}

// Whether what saved-tensor hooks gave back is what was saved: see layer_norm/node.cpp.
bool is_as_saved(const Call &call, const Operands &o, const Kept &kept) {
  const auto is = [&](const Tensor &t, const Tensor &like, int64_t columns) {
    return t.defined() && is_of(call, t) && t.dim() == 2 && t.size(0) == like.size(0) &&
           t.size(1) == columns;
  };
  if (!o.x.defined() || !o.h.defined() || !o.w_ih.defined() || !o.w_hh.defined() || !fits(call, o))
    return false;
  const int64_t hidden = o.h.size(1);
  return is(kept.input, o.h, call.gates * hidden) &&
         (call.is_gru() ? is(kept.hidden, o.h, call.gates * hidden) : is(kept.after, o.h, hidden));
}

std::optional<Tensor> optional(const Tensor &tensor) {
  return tensor.defined() ? std::optional<Tensor>(tensor) : std::nullopt;
}

struct Step : torch::autograd::Function<Step> {
  static variable_list forward(torch::autograd::AutogradContext *context, const Tensor &x,
                               const Tensor &h, const std::optional<Tensor> &c,
                               const Tensor &w_ih, const Tensor &w_hh,
                               const std::optional<Tensor> &b_ih,
                               const std::optional<Tensor> &b_hh, int64_t call_address) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const Call &call = *reinterpret_cast<const Call *>(call_address);
    const Operands o{x,    h,    c.value_or(Tensor()),   w_ih,
                     w_hh, b_ih.value_or(Tensor()), b_hh.value_or(Tensor())};
    Made made = run_forward(call, o, true);
    const Tensor after = call.is_gru() ? Tensor() : call.has_c ? made.c : made.h;
    context->save_for_backward({o.x, o.h, o.c, o.w_ih, o.w_hh, o.b_ih, o.b_hh, made.from_input,
                                call.is_gru() ? made.from_hidden : Tensor(), after});
    context->saved_data["call"] = call_address;
    context->set_materialize_grads(false);
    variable_list outputs{made.h};
    if (call.has_c) outputs.push_back(made.c);
    return outputs;
  }

  static variable_list backward(torch::autograd::AutogradContext *context, variable_list grads) {
    const Call &call = *reinterpret_cast<const Call *>(context->saved_data["call"].toInt());
    const variable_list saved = context->get_saved_variables();
    const Operands o{saved[0], saved[1], saved[2], saved[3], saved[4], saved[5], saved[6]};
    const Kept kept{saved[7], saved[8], saved[9]};
    // Edges are counted over the tensors that there are.
    const Tensor *const operands[] = {&o.x, &o.h, &o.c, &o.w_ih, &o.w_hh, &o.b_ih, &o.b_hh};
    Needed need;
    size_t edge = 0;
    for (size_t i = 0; i < need.size(); ++i) {
      const bool there = i == 2 ? call.has_c : i < 5 || operands[i]->defined();
      need[i] = there && context->needs_input_grad(edge);
      edge += there;
    }
    const auto resolved = [](const Tensor &t) {
      return t.defined() && t.is_neg() ? t.resolve_neg() : t;
    };
    const Tensor dh = resolved(grads[0]);
    const Tensor dc = call.has_c ? resolved(grads[1]) : Tensor();
    if (!dh.defined() && !dc.defined()) return variable_list(8);
    Operands found;
    if (c10::GradMode::is_enabled() || (dh.defined() && !may_launch(dh)) ||
        (dc.defined() && !may_launch(dc)) || !is_as_saved(call, o, kept)) {
      found = run_watched_backward(call, dh, dc, o, need);
    } else {
      at::AutoDispatchBelowADInplaceOrView guard;
      c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
      const c10::DeviceGuard device(device_of(call));
      found = run_backward(call, dense(dh), dense(dc),
                           {dense(o.x), dense(o.h), dense(o.c), dense(o.w_ih), dense(o.w_hh),
                            o.b_ih, o.b_hh},
                           {dense(kept.input), dense(kept.hidden), dense(kept.after)}, need);
    }
    return {found.x,    found.h,    found.c,  found.w_ih,
            found.w_hh, found.b_ih, found.b_hh, Tensor()};
  }
};

constexpr const char *kCapsule = "hfai.kernels.cell.Call";

// What comes after the step, or nothing where the call is torch's.
variable_list run(const Call &call, const Operands &given) {
  if (!fits(call, given)) return {};
  const c10::DeviceGuard device(device_of(call));
  const Operands o{dense(given.x),    dense(given.h),    dense(given.c),   dense(given.w_ih),
                   dense(given.w_hh), dense(given.b_ih), dense(given.b_hh)};
  const auto needs = [](const Tensor &t) { return t.defined() && t.requires_grad(); };
  if (!c10::GradMode::is_enabled() ||
      !(needs(o.x) || needs(o.h) || needs(o.c) || needs(o.w_ih) || needs(o.w_hh) ||
        needs(o.b_ih) || needs(o.b_hh))) {
    const Made made = run_forward(call, o, false);
    return call.has_c ? variable_list{made.h, made.c} : variable_list{made.h};
  }
  return Step::apply(o.x, o.h, optional(o.c), o.w_ih, o.w_hh, optional(o.b_ih), optional(o.b_hh),
                     reinterpret_cast<int64_t>(&call));
}

// step(call, x, h, c, w_ih, w_hh, b_ih, b_hh) -> (h,) or (h, c), or None where a tensor does not fit
PyObject *step(PyObject *, PyObject *const *arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 8) {
    PyErr_Format(PyExc_TypeError, "step takes 8 arguments, got %zd", count);
    return nullptr;
  }
  const Call *call = static_cast<const Call *>(PyCapsule_GetPointer(arguments[0], kCapsule));
  Operands o;
  if (!call || !read_tensor(arguments[1], false, o.x) || !read_tensor(arguments[2], false, o.h) ||
      !read_tensor(arguments[3], true, o.c) || !read_tensor(arguments[4], false, o.w_ih) ||
      !read_tensor(arguments[5], false, o.w_hh) || !read_tensor(arguments[6], true, o.b_ih) ||
      !read_tensor(arguments[7], true, o.b_hh))
    return nullptr;
  variable_list made;
  {
    WithoutGil no_gil;
    made = run(*call, o);
  }
  if (made.empty()) Py_RETURN_NONE;
  Reference result(PyTuple_New(static_cast<Py_ssize_t>(made.size())));
  for (size_t i = 0; i < made.size(); ++i)
    PyTuple_SET_ITEM(result.object, static_cast<Py_ssize_t>(i), THPVariable_Wrap(made[i]));
  return Py_NewRef(result.object);
  END_HANDLE_TH_ERRORS
}

bool read_kernel(PyObject *description, Kernel &kernel) {
  unsigned long long function;
  int device, overlap;
  unsigned block, shared_bytes, cluster;
  if (!PyArg_ParseTuple(description, "KiIIIp", &function, &device, &block, &shared_bytes, &cluster,
                        &overlap))
    return false;
  kernel = {static_cast<uintptr_t>(function), device, block, shared_bytes, cluster, overlap != 0};
  return true;
}

// make_call(configuration, watched_backward, device, gates, kept, has_c, dtype,
//           (units, group_rows, threads), forward, backward, add_sums) -> call
PyObject *make_call(PyObject *, PyObject *arguments) {
  HANDLE_TH_ERRORS
  PyObject *configuration, *watched_backward, *type, *forward, *backward, *add_sums;
  int device, has_c;
  long long gates, kept, units, group_rows, threads;
  if (!PyArg_ParseTuple(arguments, "OOiLLpO!(LLL)O!O!O!", &configuration, &watched_backward,
                        &device, &gates, &kept, &has_c, &THPDtypeType, &type, &units, &group_rows,
                        &threads, &PyTuple_Type, &forward, &PyTuple_Type, &backward, &PyTuple_Type,
                        &add_sums))
    return nullptr;
  auto call = std::make_unique<Call>();
  call->configuration = Py_NewRef(configuration);
  call->watched_backward = Py_NewRef(watched_backward);
  call->device = device;
  call->gates = gates;
  call->kept = kept;
  call->has_c = has_c;
  call->type = reinterpret_cast<THPDtype *>(type)->scalar_type;
  call->units = units;
  call->group_rows = group_rows;
  call->threads = threads;
  if (!read_kernel(forward, call->forward) || !read_kernel(backward, call->backward) ||
      !read_kernel(add_sums, call->add_sums))
    return nullptr;
  // Never freed: a node of a graph may outlive whoever made the call, and there are few of them.
  return PyCapsule_New(call.release(), kCapsule, nullptr);
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    {"make_call", make_call, METH_VARARGS, "Prepare the calls of one configuration."},
    {"step", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(step)), METH_FASTCALL,
     "Make one step, differentiably: (call, x, h, c, w_ih, w_hh, b_ih, b_hh) -> (h,) or (h, c)."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "cell_node", "A cell's step and autograd node.", -1,
                          methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_cell_node() { return PyModule_Create(&definition); }
