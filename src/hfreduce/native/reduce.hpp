// Reductions of n arrays into one or two, elementwise: the table that dispatch.cpp fills.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hfreduce {

// The numbers are part of the layout that ranks share; Python's are in hfreduce/dtypes.py.
enum class Dtype : uint8_t {
  kFloat32, kFloat16, kBFloat16, kFloat8E4M3, kFloat8E5M2, kFloat64, kInt32, kInt64, kInt8, kUInt8,
  kCount
};
enum class Op : uint8_t { kSum, kAverage, kMin, kMax, kCount };

constexpr size_t kDtypes = static_cast<size_t>(Dtype::kCount);
constexpr size_t kOps = static_cast<size_t>(Op::kCount);
constexpr size_t kItemBytes[kDtypes] = {4, 2, 2, 1, 1, 8, 4, 8, 1, 1};

// Combines `count` elements of sources[0], sources[1], … sources[n - 1], in that order, and writes
// the result to `out` and, where it is not null, to `copy`. Either may be one of the sources.
// Pointers need no alignment. Null in a table: the operation has no meaning (averages of integers).
using Reduce = void (*)(const void *const *sources, int n, void *out, void *copy, size_t count);

struct Table {
  Reduce functions[kDtypes][kOps];
};

extern const Table kPortable;
#ifdef HFREDUCE_X86
extern const Table kAvx2;
extern const Table kAvx512;
#endif

}  // namespace hfreduce
