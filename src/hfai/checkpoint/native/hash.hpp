// XXH3-64 of a chunk that comes in pieces, by the widest instructions that this CPU has.
//
// xxhash.h fixes its instruction set when it is compiled, so that each set is a source of its own
// (hash_*.cpp) that is compiled for it and used only where the CPU has it. All give the same bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>

namespace checkpoint {

struct HashWay {
  const char *name;
  void (*reset)(void *state);
  void (*update)(void *state, const void *data, size_t size);
  uint64_t (*digest)(const void *state);
};

extern const HashWay kPortable;
#ifdef CHECKPOINT_X86
extern const HashWay kAvx2;
extern const HashWay kAvx512;
#endif

inline const HashWay &best_way() {
#ifdef CHECKPOINT_X86
  static const HashWay &best = __builtin_cpu_supports("avx512f") ? kAvx512
                               : __builtin_cpu_supports("avx2")  ? kAvx2
                                                                 : kPortable;
  return best;
#else
  return kPortable;
#endif
}

class Hash {
 public:
  static constexpr size_t kDigits = 16;

  void reset() { way_.reset(state_); }
  void update(const void *data, size_t size) { way_.update(state_, data, size); }
  // Writes the digits that the index has: lower-case hexadecimal, most significant first.
  void digest(char *digits) const {
    char text[kDigits + 1];
    std::snprintf(text, sizeof text, "%016llx",
                  static_cast<unsigned long long>(way_.digest(state_)));
    for (size_t i = 0; i < kDigits; ++i) digits[i] = text[i];
  }

 private:
  const HashWay &way_ = best_way();
  // Holds an XXH3_state_t; hash_way.inc checks that it fits.
  alignas(64) unsigned char state_[640];
};

}  // namespace checkpoint
