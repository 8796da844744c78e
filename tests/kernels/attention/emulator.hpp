// What the attention kernels need beyond the recurrent ones' emulator: tensor_cores.cuh in plain
// C++, by PTX's documented layouts, and the vectors of common.cuh.
//
// An asynchronous copy happens when its thread waits for it, not before: a missing wait is found.

#include "../rnn/emulator.hpp"

#include <algorithm>
#include <cstdio>
#include <map>

struct uint2 {
  u32 x, y;
};
using std::max;
using std::min;
using ::fmaxf;
using ::fminf;
using ::copysignf;
using ::fabsf;
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline u32 __shfl_xor_sync(u32, u32 value, int mask) {
  return __float_as_uint(shuffle_from(__uint_as_float(value), threadIdx.x % 32 ^ mask));
}

template <class T, int LENGTH>
struct Vector {
  T element[LENGTH];
  float operator[](int i) const { return to_float(element[i]); }
};
template <bool ALIGNED, class T, int LENGTH>
Vector<T, LENGTH> load_kept(const T* source) {
  Vector<T, LENGTH> result;
  std::memcpy(&result, source, sizeof result);
  return result;
}

inline void demand_aligned(const void* address) {
  if (reinterpret_cast<uintptr_t>(address) % 16 == 0) return;
  std::fprintf(stderr, "an address is no multiple of 16\n");
  std::abort();
}

inline const char* row_of_matrix(const void* own, int matrix, int row) {
  emulator::Warp& warp = *emulator::current->warp;
  return reinterpret_cast<const char*>(warp.a[8 * matrix + row]);
}
template <class Take>
inline void take_matrices(u32 (&word)[4], const void* row, Take take) {
  demand_aligned(row);
  emulator::Warp& warp = emulator::sync_warp();
  warp.a[threadIdx.x % 32] = static_cast<const u32*>(row);
  emulator::sync_warp();
  for (int i = 0; i < 4; ++i) word[i] = take(i);
  emulator::sync_warp();
}
inline void load_matrices(u32 (&word)[4], const void* row) {
  const int lane = threadIdx.x % 32;
  take_matrices(word, row, [&](int i) {
    u32 value;
    std::memcpy(&value, row_of_matrix(row, i, lane / 4) + lane % 4 * 4, 4);
    return value;
  });
}
inline void load_matrices_transposed(u32 (&word)[4], const void* row) {
  const int lane = threadIdx.x % 32;
  take_matrices(word, row, [&](int i) {
    u16 first, second;
    std::memcpy(&first, row_of_matrix(row, i, lane % 4 * 2) + lane / 4 * 2, 2);
    std::memcpy(&second, row_of_matrix(row, i, lane % 4 * 2 + 1) + lane / 4 * 2, 2);
    return static_cast<u32>(first) | static_cast<u32>(second) << 16;
  });
}

inline void load_16_bytes_or_zeros(float (&value)[4], const float* source, bool load) {
  std::memset(value, 0, sizeof value);
  if (!load) return;
  demand_aligned(source);
  std::memcpy(value, source, sizeof value);
}
inline void atomicMax(u32* target, u32 value) { *target = max(*target, value); }
inline u32 __reduce_max_sync(u32, u32 value) {
  for (int offset = 16; offset > 0; offset /= 2)
    value = max(value, __shfl_xor_sync(0xffffffffu, value, offset));
  return value;
}

inline void store_16_bytes(void* target, const u32 (&word)[4]) {
  demand_aligned(target);
  std::memcpy(target, word, 16);
}

struct PendingCopy {
  void* target;
  const void* source;
  bool copy;
};
typedef std::vector<std::vector<PendingCopy>> CopyGroups;  // the last one is not committed yet
inline CopyGroups& copy_groups() {
  static std::map<const void*, CopyGroups> groups;
  CopyGroups& own = groups[emulator::current];
  if (own.empty()) own.emplace_back();
  return own;
}
inline void copy_async_or_zeros(void* target, const void* source, bool copy) {
  demand_aligned(target);
  if (copy) demand_aligned(source);
  copy_groups().back().push_back({target, source, copy});
}
inline void copy_async_commit() { copy_groups().emplace_back(); }
template <int PENDING>
inline void copy_async_wait() {
  CopyGroups& groups = copy_groups();
  while (static_cast<int>(groups.size()) - 1 > PENDING) {
    for (const PendingCopy& pending : groups.front()) {
      if (pending.copy)
        std::memcpy(pending.target, pending.source, 16);
      else
        std::memset(pending.target, 0, 16);
    }
    groups.erase(groups.begin());
  }
}
