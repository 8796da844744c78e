// Bytes between memory and files, hashed on the way, without the GIL: one call a segment.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "read.hpp"
#include "write.hpp"

namespace nb = nanobind;

namespace {

using checkpoint::Hash;

// The memory of Python objects, held as long as this lives.
class Buffers {
 public:
  Buffers(const nb::list &objects, int flags) {
    views_.reserve(objects.size());
    for (const nb::handle object : objects) {
      views_.emplace_back();
      if (PyObject_GetBuffer(object.ptr(), &views_.back(), flags)) {
        views_.pop_back();
        release();
        throw nb::python_error();
      }
    }
  }
  ~Buffers() { release(); }
  Buffers(const Buffers &) = delete;
  Buffers &operator=(const Buffers &) = delete;

  size_t size() const { return views_.size(); }
  char *data(size_t at) const { return static_cast<char *>(views_[at].buf); }
  size_t bytes(size_t at) const { return static_cast<size_t>(views_[at].len); }

 private:
  void release() {
    for (Py_buffer &view : views_) PyBuffer_Release(&view);
    views_.clear();
  }
  std::vector<Py_buffer> views_;
};

// Returns the first failure as (run, errno or -1 or 0, chunk of the run, its hash), or None.
std::optional<std::tuple<int64_t, int, size_t, std::string>> read_runs(
    int descriptor, const std::vector<int64_t> &offsets, const nb::list &buffers,
    const std::vector<std::string> &hashes, size_t chunk) {
  if (!chunk) throw std::invalid_argument("chunk is 0");
  if (offsets.size() != buffers.size() || (!hashes.empty() && hashes.size() != offsets.size()))
    throw std::invalid_argument("offsets, buffers and hashes differ in length");
  const Buffers memory(buffers, PyBUF_WRITABLE);
  std::vector<checkpoint::Run> runs;
  runs.reserve(offsets.size());
  for (size_t i = 0; i < offsets.size(); ++i) {
    const size_t size = memory.bytes(i), chunks = size / chunk + (size % chunk != 0);
    if (offsets[i] < 0) throw std::invalid_argument("an offset is negative");
    if (!hashes.empty() && hashes[i].size() != chunks * Hash::kDigits)
      throw std::invalid_argument("a run has another number of hashes than of chunks");
    runs.push_back({offsets[i], memory.data(i), size, hashes.empty() ? nullptr : hashes[i].data()});
  }
  checkpoint::Failure failure;
  {
    nb::gil_scoped_release unlocked;
    failure = checkpoint::Reader(descriptor, chunk).read(runs);
  }
  if (failure.run < 0) return std::nullopt;
  return std::make_tuple(failure.run, failure.code, failure.chunk, failure.found);
}

// Returns an errno, or 0, and the hashes back to back.
std::pair<int, std::string> write_views(int descriptor, int direct, bool early, bool in_memory,
                                        int64_t offset, const nb::list &buffers) {
  if (offset < 0) throw std::invalid_argument("the offset is negative");
  const Buffers memory(buffers, PyBUF_SIMPLE);
  std::vector<checkpoint::View> views;
  views.reserve(memory.size());
  for (size_t i = 0; i < memory.size(); ++i) views.push_back({memory.data(i), memory.bytes(i)});
  std::string hashes;
  int code;
  {
    nb::gil_scoped_release unlocked;
    code = checkpoint::Writer(descriptor, direct, early, in_memory).write(views, offset, hashes);
  }
  return {code, hashes};
}

PyObject *probe = nullptr;

void call_probe() {
  nb::gil_scoped_acquire locked;
  if (!probe) return;
  PyObject *result = PyObject_CallNoArgs(probe);
  if (!result) PyErr_WriteUnraisable(probe);
  Py_XDECREF(result);
}

void set_probe(nb::object call) {
  checkpoint::boundary = call.is_none() ? nullptr : call_probe;
  PyObject *before = probe;
  probe = call.is_none() ? nullptr : call.release().ptr();
  Py_XDECREF(before);
}

}  // namespace

NB_MODULE(_transfer, module) {
  module.doc() = "Bytes between memory and files, hashed on the way.";
  module.attr("ENDED") = checkpoint::kEnded;
  module.attr("DIRECT_UNIT") = static_cast<size_t>(checkpoint::kDirectUnit);
  module.def("read", &read_runs, nb::arg("descriptor"), nb::arg("offsets"), nb::arg("buffers"),
             nb::arg("hashes"), nb::arg("chunk"),
             "Fill each buffer from its offset on and compare the hash of each chunk.\n\n"
             "Returns None, or of the first failure: which buffer; errno, ENDED, or 0 where a hash "
             "differs; which chunk of it; its hash.");
  module.def("write", &write_views, nb::arg("descriptor"), nb::arg("direct"), nb::arg("early"),
             nb::arg("in_memory"), nb::arg("offset"), nb::arg("buffers"),
             "Write buffers back to back; returns an errno or 0, and the buffers' hashes.");
  module.def("is_in_memory", &checkpoint::is_in_memory, nb::arg("descriptor"),
             "Whether a file is on tmpfs or ramfs.");
  module.def("reserve", &checkpoint::reserve, nb::arg("descriptor"), nb::arg("size"),
             "Ask for a file's blocks; returns an errno or 0.");
  module.def("hash_way", [] { return checkpoint::best_way().name; },
             "The instruction set that hashes.");
  module.def("force_huge_pages",
             [](std::optional<bool> huge) {
               using checkpoint::Choice;
               checkpoint::choice.force(!huge ? Choice::kFree
                                              : *huge ? Choice::kHuge : Choice::kSmall);
             },
             nb::arg("huge").none(),
             "For tests: write files in memory always by huge pages where that can be, or never; "
             "None: as is quicker.");
  module.def("set_probe", &set_probe, nb::arg("call").none(),
             "For tests: call this before and after each system call that changes a file.");
}
