// The engine of hfreduce for Python: collectives of one group of processes on one node.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <system_error>
#include <tuple>

#include "cuda_path.hpp"

namespace nb = nanobind;
using namespace hfreduce;

namespace {

// (reason, rank, found out by another rank)
using Outcome = std::tuple<int, int, bool>;

Outcome outcome(const Status &status) {
  return {static_cast<int>(status.reason), status.rank, status.told};
}

bool signal_raised() {
  nb::gil_scoped_acquire locked;
  return PyErr_CheckSignals() != 0;
}

// What the system refuses is an OSError with its number. No translator is registered: nanobind would
// use it for the functions of other modules too.
template <class Function>
auto or_oserror(Function function) {
  try {
    return function();
  } catch (const std::system_error &error) {
    nb::object arguments = nb::make_tuple(error.code().value(), error.what());
    PyErr_SetObject(PyExc_OSError, arguments.ptr());
    throw nb::python_error();
  }
}

Options options_of(int rank, int world, int lanes, int slots, size_t slot_bytes,
                   size_t direct_bytes, const std::string &instructions, int pauses, int yields) {
  if (world < 1 || rank < 0 || rank >= world || lanes < 1 || slots < 4 ||
      slot_bytes < static_cast<size_t>(64 * world) || slot_bytes % 64 || direct_bytes > slot_bytes)
    throw std::invalid_argument("no such group");
  Options options;
  options.rank = rank;
  options.shape.world = world;
  options.shape.lanes = lanes;
  options.shape.slots = slots;
  options.shape.slot_bytes = slot_bytes;
  options.tuning.chunk_bytes = slot_bytes;
  options.tuning.direct_bytes = direct_bytes;
  options.instructions = instructions;
  options.pauses = pauses;
  options.yields = yields;
  return options;
}

std::string checked(const nb::bytes &token) {
  if (token.size() != kTokenBytes) throw std::invalid_argument("a token has 16 bytes");
  return std::string(token.c_str(), token.size());
}

Outcome run(Group &group, int kind, int dtype, int op, int rank, int root,
            const std::vector<uintptr_t> &sources, const std::vector<uintptr_t> &targets,
            const std::vector<int64_t> &counts, bool signals) {
  Call call;
  call.kind = static_cast<Kind>(kind);
  call.dtype = static_cast<Dtype>(dtype);
  call.op = static_cast<Op>(op);
  call.rank = rank;
  call.root = root;
  for (const uintptr_t p : sources) call.sources.push_back(reinterpret_cast<const char *>(p));
  for (const uintptr_t p : targets) call.targets.push_back(reinterpret_cast<char *>(p));
  call.counts = counts;
  Status status;
  or_oserror([&] {
    nb::gil_scoped_release unlocked;
    status = group.run(call, signals ? signal_raised : std::function<bool()>());
  });
  if (PyErr_Occurred()) throw nb::python_error();
  return outcome(status);
}

// Combines arrays in this process, for tests: the same functions that a group runs.
void combine(const std::string &instructions, int dtype, int op,
             const std::vector<uintptr_t> &sources, uintptr_t out, uintptr_t copy, size_t count) {
  const InstructionSet *set = instruction_set(instructions);
  if (!set) throw std::invalid_argument("this processor does not run " + instructions);
  if (dtype < 0 || dtype >= static_cast<int>(kDtypes) || op < 0 || op >= static_cast<int>(kOps))
    throw std::invalid_argument("no such dtype or operation");
  const Reduce function = set->table->functions[dtype][op];
  if (!function) throw std::invalid_argument("the operation has no meaning for this dtype");
  std::vector<const void *> rows;
  for (const uintptr_t p : sources) rows.push_back(reinterpret_cast<const void *>(p));
  nb::gil_scoped_release unlocked;
  function(rows.data(), static_cast<int>(rows.size()), reinterpret_cast<void *>(out),
           reinterpret_cast<void *>(copy), count);
}

std::vector<std::string> names() {
  std::vector<std::string> found;
  size_t count;
  const InstructionSet *sets = instruction_sets(count);
  for (size_t i = 0; i < count; ++i) found.push_back(sets[i].name);
  return found;
}

}  // namespace

NB_MODULE(_engine, module) {
  // A group may live as long as the interpreter: torch keeps its process groups in globals.
  nb::set_leak_warnings(false);
  module.doc() = "Collectives of the processes on one node, through memory that they share.";
  nb::class_<Group>(module, "Group")
      .def_static(
          "create",
          [](const nb::bytes &token, int rank, int world, int lanes, int slots, size_t slot_bytes,
             size_t direct_bytes, const std::string &instructions, int pauses, int yields) {
            const Options options = options_of(rank, world, lanes, slots, slot_bytes, direct_bytes,
                                               instructions, pauses, yields);
            return or_oserror(
                [&] { return new Group(Segment::create(options.shape, checked(token)), options); });
          },
          nb::arg("token"), nb::arg("rank"), nb::arg("world"), nb::arg("lanes"), nb::arg("slots"),
          nb::arg("slot_bytes"), nb::arg("direct_bytes"), nb::arg("instructions"),
          nb::arg("pauses"), nb::arg("yields"), "Make the memory of a group.")
      .def_static(
          "open",
          [](const nb::bytes &token, int pid, int descriptor, int rank, int world, int lanes,
             int slots, size_t slot_bytes, size_t direct_bytes, const std::string &instructions,
             int pauses, int yields) {
            const Options options = options_of(rank, world, lanes, slots, slot_bytes, direct_bytes,
                                               instructions, pauses, yields);
            return or_oserror([&] {
              return new Group(Segment::open(options.shape, checked(token), pid, descriptor),
                               options);
            });
          },
          nb::arg("token"), nb::arg("pid"), nb::arg("descriptor"), nb::arg("rank"),
          nb::arg("world"), nb::arg("lanes"), nb::arg("slots"), nb::arg("slot_bytes"),
          nb::arg("direct_bytes"), nb::arg("instructions"), nb::arg("pauses"), nb::arg("yields"),
          "Open the memory that another process made.")
      .def(
          "join",
          [](Group &group, const std::vector<int> &pids, const std::vector<int64_t> &starts,
             double timeout) {
            Status status;
            {
              nb::gil_scoped_release unlocked;
              status = group.join(pids, starts, timeout, signal_raised);
            }
            if (PyErr_Occurred()) throw nb::python_error();
            return outcome(status);
          },
          nb::arg("pids"), nb::arg("starts"), nb::arg("timeout"),
          "Wait until all ranks have mapped the memory.")
      .def("run", &run, nb::arg("kind"), nb::arg("dtype"), nb::arg("op"), nb::arg("rank"),
           nb::arg("root"), nb::arg("sources"), nb::arg("targets"), nb::arg("counts"),
           nb::arg("signals"),
           "Run a collective without the GIL; returns (reason, rank, told).\n\n"
           "Pointers and counts are trusted: hfreduce.Reducer checks them.")
      .def("set_timeout", &Group::set_timeout, nb::arg("seconds"))
      .def("interrupt", &Group::interrupt, "Break the group: this rank was interrupted.")
      .def("abandon", &Group::abandon, "Break the group: this rank lost its way to other nodes.")
      .def("stop", &Group::stop, "Make a call that waits return, and no other begin.")
      .def("close", &Group::close, nb::call_guard<nb::gil_scoped_release>(),
           "Tell the others that this rank takes part no more; no call may be running.")
      .def_prop_ro("descriptor", &Group::descriptor)
      .def_prop_ro("nbytes", &Group::bytes)
      .def_prop_ro("mismatch", [](const Group &group) {
        const Stamp &stamp = group.mismatch();
        return std::make_tuple(static_cast<int>(stamp.kind), static_cast<int>(stamp.dtype),
                               static_cast<int>(stamp.op), static_cast<int>(stamp.root),
                               static_cast<int64_t>(stamp.count));
      }, "(kind, dtype, op, root, count) that another rank called instead.");
  nb::class_<CudaPath>(module, "CudaPath")
      .def(nb::init<Group &, int, bool, int>(), nb::arg("group"), nb::arg("device"),
           nb::arg("flags"), nb::arg("threads"), nb::keep_alive<1, 2>(),
           "Pin the group's memory in a device's primary context; RuntimeError in CUDA's words.")
      .def_prop_ro("flags", &CudaPath::flags)
      .def_prop_ro("busy", [](const CudaPath &p) {
        const Busy busy = p.busy();
        return std::make_tuple(busy.all, busy.out, busy.adding, busy.back);
      }, "(seconds in calls; with copies out, sums and copies back under way)")
      .def(
          "trace",
          [](CudaPath &path) {
            nb::list rows;
            for (const Trace::Note &n : path.trace())
              rows.append(nb::make_tuple(n.nanoseconds, static_cast<int>(n.stage), n.chunk, n.lane));
            return rows;
          },
          "Take what HFREDUCE_TRACE noted: (nanoseconds, stage, chunk, lane or -1); between calls.")
      .def_prop_ro("out", [](const CudaPath &p) { return reinterpret_cast<uintptr_t>(p.out()); })
      .def_prop_ro("back", [](const CudaPath &p) { return reinterpret_cast<uintptr_t>(p.back()); })
      .def(
          "chunks",
          [](const CudaPath &path, int64_t count, int dtype) {
            return path.chunks_of({0, count, static_cast<Dtype>(dtype), Op::kSum, 0});
          },
          nb::arg("count"), nb::arg("dtype"), "How many chunks a tensor has.")
      .def(
          "enqueue",
          [](CudaPath &path, uintptr_t tensor, int64_t count, int dtype, int op, uint32_t first) {
            path.enqueue({tensor, count, static_cast<Dtype>(dtype), static_cast<Op>(op), first});
          },
          nb::arg("tensor"), nb::arg("count"), nb::arg("dtype"), nb::arg("op"), nb::arg("first"),
          nb::call_guard<nb::gil_scoped_release>(), "Enqueue all copies of an all-reduce.")
      .def(
          "submit",
          [](CudaPath &path, uintptr_t tensor, int64_t count, int dtype, int op, uint32_t first) {
            path.submit({tensor, count, static_cast<Dtype>(dtype), static_cast<Op>(op), first});
          },
          nb::arg("tensor"), nb::arg("count"), nb::arg("dtype"), nb::arg("op"), nb::arg("first"),
          nb::call_guard<nb::gil_scoped_release>(), "Announce an all-reduce, before `enqueue`.")
      .def(
          "wait",
          [](CudaPath &path, uint32_t end) {
            Status status;
            {
              nb::gil_scoped_release unlocked;
              status = path.wait(end);
            }
            return outcome(status);
          },
          nb::arg("end"), "Wait for all chunks before `end`; returns (reason, rank, told).")
      .def("close", &CudaPath::close, nb::call_guard<nb::gil_scoped_release>(),
           "Unpin; no call may be running.");
  module.def("start_time", &start_time, nb::arg("pid"),
             "When a process started, in clock ticks since boot; -1: it does not live.");
  module.def("combine", &combine, nb::arg("instructions"), nb::arg("dtype"), nb::arg("op"),
             nb::arg("sources"), nb::arg("out"), nb::arg("copy"), nb::arg("count"),
             "Combine arrays by address with one instruction set.");
  module.def("instruction_sets", &names, "What this processor runs, the best first.");
}
