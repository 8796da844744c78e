// What these kernels need beyond attention's emulator: more of common.cuh, in plain C++. Its RowSum is
// not here: emulated.py takes the real one.

#include "../attention/emulator.hpp"

#include <utility>

#define __align__(bytes) alignas(bytes)
inline u32 __umulhi(u32 a, u32 b) { return static_cast<u32>(static_cast<u64>(a) * b >> 32); }
inline float __ldg(const float* source) { return *source; }
inline float __ldcg(const float* source) { return *source; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline void let_next_kernel_start() {}
inline void wait_for_previous_kernel() {}
inline u32 cluster_rank() { return 0; }
inline void cluster_barrier() {}
inline void cluster_store(float*, u32, float) {}

inline void demand_aligned_to(const void* address, int bytes) {
  if (reinterpret_cast<uintptr_t>(address) % bytes == 0) return;
  std::fprintf(stderr, "an address is no multiple of %d\n", bytes);
  std::abort();
}
template <bool ALIGNED, class T, int LENGTH>
void store_kept(T* target, const float (&value)[LENGTH]) {
  demand_aligned_to(target, smaller(16, LENGTH * sizeof(T)));
  for (int i = 0; i < LENGTH; ++i) target[i] = from_float<T>(value[i]);
}
template <bool HAS_WEIGHT, bool HAS_BIAS, class V>
float scale_and_shift(float value, const V& weight, const V& bias, int e) {
  if constexpr (HAS_WEIGHT && HAS_BIAS) return __fmaf_rn(value, weight[e], bias[e]);
  if constexpr (HAS_WEIGHT) return value * weight[e];
  if constexpr (HAS_BIAS) return value + bias[e];
  return value;
}

// The named barriers of a block.
inline void barrier(int id, int threads) {
  static std::map<std::pair<const void*, int>, emulator::Barrier> barriers;
  emulator::Barrier& own = barriers[{emulator::current->home, id}];
  own.members = threads;
  emulator::wait(own);
}
