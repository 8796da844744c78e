// Stands in for warpgroup.cuh and products/machine.cuh: barriers, the copy engine and a warpgroup's
// products in plain C++, by PTX's documented layouts.
//
// Products are made where they are asked for: their operands have arrived by then, or the result is
// wrong. Sums are exact and rounded once an instruction; how a tensor core cuts them off is not in here.

#include "../rnn/emulator.hpp"

#include <algorithm>
#include <map>

using ::fabsf;
using ::fmaf;
using std::min;

struct float2 {
  float x, y;
};

inline char* start_of_shared() {
  uintptr_t start = reinterpret_cast<uintptr_t>(emulator::current->home->shared.data());
  return reinterpret_cast<char*>((start + 1023) / 1024 * 1024);
}
inline u32 describe(const void* tile) {
  return static_cast<u32>(static_cast<const char*>(tile) - start_of_shared()) >> 4 | 1u << 16;
}
inline int warpgroup_index() { return threadIdx.x / 128; }
inline void let_next_kernel_start() {}
inline void wait_for_previous_kernel() {}
inline void begin_products() {}
inline void end_products() {}
template <int PENDING>
void wait_products() {}
template <int TILES>
void hold(float (&)[TILES][4]) {}
template <int COUNT>
void keep_registers() {}
template <int COUNT>
void ask_for_registers() {}

// A barrier's own word is not used; its state is kept by its address.
struct PhaseBarrier {
  int members = 0, arrived = 0;
  i64 bytes = 0;
  u32 phases_over = 0;
};
inline std::map<const u64*, PhaseBarrier>& phase_barriers() {
  static std::map<const u64*, PhaseBarrier> barriers;
  return barriers;
}
inline void turn(PhaseBarrier& barrier) {
  if (barrier.arrived < barrier.members || barrier.bytes != 0) return;
  barrier.arrived = 0;
  ++barrier.phases_over;
  emulator::moved = true;
}
inline void barrier_init(u64* barrier, int count) { phase_barriers()[barrier] = {count}; }
inline void barriers_are_made() {}
inline void barrier_arrive(u64* barrier) {
  PhaseBarrier& state = phase_barriers()[barrier];
  ++state.arrived;
  turn(state);
}
inline void barrier_expect(u64* barrier, int bytes) {
  phase_barriers()[barrier].bytes += bytes;
  barrier_arrive(barrier);
}
inline void barrier_wait(u64* barrier, u32 parity) {
  while (phase_barriers()[barrier].phases_over % 2 == parity) emulator::yield();
}
inline void copy_bytes(char* target, const char* source, int bytes, u64* barrier) {
  for (uintptr_t number : {uintptr_t(target), uintptr_t(source), uintptr_t(bytes)})
    if (number % 16) std::abort();
  std::memcpy(target, source, bytes);
  PhaseBarrier& state = phase_barriers()[barrier];
  state.bytes -= bytes;
  turn(state);
}

// Element (row, k) of an operand whose rows are 64 bytes under the 64-byte swizzle, which swaps bits
// 4 and 5 of an address by its bits 7 and 8.
inline double element_of(u32 operand, int row, int k) {
  u32 address = ((operand & 0x3fff) << 4) + row / 8 * 512 + row % 8 * 64 + k * 2;
  address ^= (address >> 7 & 3) << 4;
  BFloat16 value;
  std::memcpy(&value, start_of_shared() + address, 2);
  return to_float(value);
}
template <bool ADD>
void multiply(float (&sum)[16][4], u32 a, u32 b) {
  const int lane = threadIdx.x % 32, first = threadIdx.x % 128 / 32 * 16;
  double left[2][16];
  for (int lower = 0; lower < 2; ++lower)
    for (int k = 0; k < 16; ++k) left[lower][k] = element_of(a, first + lane / 4 + 8 * lower, k);
  for (int t = 0; t < 16; ++t)
    for (int i = 0; i < 2; ++i) {
      double right[16];
      for (int k = 0; k < 16; ++k) right[k] = element_of(b, t * 8 + lane % 4 * 2 + i, k);
      for (int lower = 0; lower < 2; ++lower) {
        double total = ADD ? sum[t][2 * lower + i] : 0.0;
        for (int k = 0; k < 16; ++k) total += left[lower][k] * right[k];
        sum[t][2 * lower + i] = static_cast<float>(total);
      }
    }
}
