// The native engines of ffrecord: one call reads and checks a whole batch without the GIL.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>

#include "arena.hpp"
#include "cached.hpp"
#include "queue.hpp"

namespace nb = nanobind;

namespace {

using Column = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Checksums = nb::ndarray<uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

enum class Way { io_uring, libaio, threads };

Way way_of(const std::string &name) {
  if (name == "io_uring") return Way::io_uring;
  if (name == "libaio") return Way::libaio;
  if (name == "threads") return Way::threads;
  throw std::invalid_argument("no such way to wait for the disk: " + name);
}

// Returns the failed request and its errno (0: the file ended), or -1 and 0.
std::pair<int64_t, int> read_batch(const Column &keys, const Column &offsets,
                                   const Column &lengths, const Column &positions,
                                   const Bytes &arena, const Checksums &checksums, bool check,
                                   const std::string &name, bool direct, bool cached_first,
                                   size_t threads) {
  const Way way = way_of(name);
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
  auto cold = ffrecord::merge(batch.requests);
  if (cached_first) cold = ffrecord::read_cached(batch, cold, std::max<size_t>(threads, 1));
  const bool done =
      way == Way::io_uring ? ffrecord::read_by_queue<ffrecord::Ring>(batch, cold, direct)
      : way == Way::libaio ? ffrecord::read_by_queue<ffrecord::Aio>(batch, cold, true)
                           : false;
  if (!done) ffrecord::read_by_threads(batch, cold);
  return {batch.failed, batch.code};
}

int probe(const std::string &name, int descriptor) {
  switch (way_of(name)) {
    case Way::io_uring:
      return ffrecord::probe_queue<ffrecord::Ring>(descriptor);
    case Way::libaio:
      return ffrecord::probe_queue<ffrecord::Aio>(descriptor);
    default:
      return 0;
  }
}

// An array of `size` bytes in memory that is used again once the last view of it is gone.
nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> empty(size_t size) {
  auto arena = std::make_unique<ffrecord::Arena>(size);
  uint8_t *memory = arena->memory();
  nb::capsule owner(arena.get(),
                    [](void *held) noexcept { delete static_cast<ffrecord::Arena *>(held); });
  arena.release();
  return {memory, {size}, owner};
}

uint32_t crc32(nb::bytes data, const std::string &way) {
  const auto *start = reinterpret_cast<const uint8_t *>(data.c_str());
  if (way.empty()) return ffrecord::crc32(start, data.size());
  for (const ffrecord::CrcWay &known : ffrecord::kCrcWays)
    if (way == known.name && known.works()) return ~known.update(start, data.size(), ~0u);
  throw std::invalid_argument("this CPU has no such way to compute a checksum: " + way);
}

nb::list crc32_ways() {
  nb::list names;
  for (const ffrecord::CrcWay &way : ffrecord::kCrcWays)
    if (way.works()) names.append(way.name);
  return names;
}

}  // namespace

NB_MODULE(_native, module) {
  module.doc() = "The native engines of ffrecord.";
  module.attr("LEAST_ARENA") = ffrecord::kLeastArena;
  module.def("read_batch", &read_batch, nb::arg("keys"), nb::arg("offsets"), nb::arg("lengths"),
             nb::arg("positions"), nb::arg("arena"), nb::arg("checksums"), nb::arg("check"),
             nb::arg("way"), nb::arg("direct"), nb::arg("cached_first"), nb::arg("threads"),
             "Read a batch; returns (request, errno) of the first failure, or (-1, 0).\n\n"
             "errno 0 says that the file ended before the request.");
  module.def("probe", &probe, nb::arg("way"), nb::arg("descriptor"),
             "Read a byte that way; returns 0, or the errno that says why not.");
  module.def("empty", &empty, nb::arg("size"),
             "An array of bytes in memory that is used again when it is let go of.");
  module.def("idle_bytes", [] { return ffrecord::ArenaPool::of_process().idle_bytes(); },
             "The memory that waits to be used again.");
  module.def("crc32", &crc32, nb::arg("data"), nb::arg("way") = "",
             "zlib's CRC-32, by the fastest way or by one of `crc32_ways`.");
  module.def("crc32_ways", &crc32_ways, "How this CPU computes checksums, the fastest way first.");
}
