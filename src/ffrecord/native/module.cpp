// The native engines of ffrecord: one call reads and checks a whole batch without the GIL.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>

#include <stdexcept>

#include "threads.hpp"
#include "uring.hpp"

namespace nb = nanobind;

namespace {

using Column = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Checksums = nb::ndarray<uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Returns the failed request and its errno (0: the file ended), or -1 and 0.
std::pair<int64_t, int> read_batch(const Column &keys, const Column &offsets,
                                   const Column &lengths, const Column &positions,
                                   const Bytes &arena, const Checksums &checksums, bool check,
                                   bool ring, bool direct) {
  const size_t count = keys.shape(0);
  if (offsets.shape(0) != count || lengths.shape(0) != count || positions.shape(0) != count ||
      (check && checksums.shape(0) != count) || count > UINT32_MAX)
    throw std::invalid_argument("the columns of a batch differ in length");
  nb::gil_scoped_release unlocked;
  ffrecord::Batch batch;
  batch.checksums = check ? checksums.data() : nullptr;
  batch.requests.reserve(count);
  const auto size = static_cast<int64_t>(arena.shape(0));
  for (size_t i = 0; i < count; ++i) {
    const int64_t length = lengths.data()[i], position = positions.data()[i];
    if (length < 0 || offsets.data()[i] < 0 || length > INT64_MAX - offsets.data()[i] ||
        position < 0 || position > size || length > size - position)
      throw std::invalid_argument("a request does not fit into the arena");
    if (length)
      batch.requests.push_back({static_cast<int>(keys.data()[i]), offsets.data()[i], length,
                                arena.data() + position, static_cast<uint32_t>(i)});
    else if (check)
      batch.checksums[i] = 0;
  }
  std::sort(batch.requests.begin(), batch.requests.end(),
            [](const ffrecord::Request &a, const ffrecord::Request &b) {
              return a.descriptor != b.descriptor ? a.descriptor < b.descriptor
                     : a.offset != b.offset       ? a.offset < b.offset
                                                  : a.index < b.index;
            });
  // Even a read that must not wait makes the kernel fetch pages into its cache, which direct reads
  // are there to avoid.
  auto cold = ffrecord::merge(batch.requests);
  if (!direct) cold = ffrecord::read_cached(batch, cold);
  if (!ring || !ffrecord::read_by_ring(batch, cold, direct))
    ffrecord::read_by_threads(batch, cold);
  return {batch.failed, batch.code};
}

uint32_t crc32(nb::bytes data, bool by_table) {
  return ffrecord::crc32(reinterpret_cast<const uint8_t *>(data.c_str()), data.size(), by_table);
}

}  // namespace

NB_MODULE(_native, module) {
  module.doc() = "The native engines of ffrecord.";
  module.def("read_batch", &read_batch, nb::arg("keys"), nb::arg("offsets"), nb::arg("lengths"),
             nb::arg("positions"), nb::arg("arena"), nb::arg("checksums"), nb::arg("check"),
             nb::arg("ring"), nb::arg("direct"),
             "Read a batch; returns (request, errno) of the first failure, or (-1, 0).\n\n"
             "errno 0 says that the file ended before the request.");
  module.def("probe_ring", &ffrecord::probe_ring, nb::arg("descriptor"),
             "Read a byte through an io_uring; returns 0, or the errno that says why not.");
  module.def("crc32", &crc32, nb::arg("data"), nb::arg("by_table") = false,
             "zlib's CRC-32, by the CPU's carry-less multiplication where it has one.");
  module.def("has_carryless_multiplication", &ffrecord::has_carryless_multiplication,
             "Whether crc32 uses carry-less multiplication on this CPU.");
}
