// Which of the compiled reductions this processor runs.
#pragma once

#include <string>

#include "reduce.hpp"

namespace hfreduce {

struct InstructionSet {
  const char *name;
  const Table *table;
};

// The best first; the portable one is always there.
inline const InstructionSet *instruction_sets(size_t &count) {
  static InstructionSet found[3];
  static const size_t n = [] {
    size_t k = 0;
#ifdef HFREDUCE_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
      found[k++] = {"avx512", &kAvx512};
    // There is no AVX2 processor without F16C.
    if (__builtin_cpu_supports("avx2")) found[k++] = {"avx2", &kAvx2};
#endif
    found[k++] = {"portable", &kPortable};
    return k;
  }();
  count = n;
  return found;
}

// Returns the named set, or the best one for an empty name; null where this processor lacks it.
inline const InstructionSet *instruction_set(const std::string &name) {
  size_t count;
  const InstructionSet *sets = instruction_sets(count);
  for (size_t i = 0; i < count; ++i)
    if (name.empty() || name == sets[i].name) return &sets[i];
  return nullptr;
}

}  // namespace hfreduce
