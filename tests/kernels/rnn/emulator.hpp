// Runs a CUDA kernel's own source on the CPU, thread by thread, so that its indexing, its barriers
// and its exchanges between blocks can be tested without a GPU.
//
// Every CUDA thread is a fiber. A fiber runs until it waits (at a barrier, for a word of memory that
// another block writes) and then the next one runs, so that waiting costs nothing and the order is
// the same every time. It stands in for common.cuh and machine.cuh: the same names, in plain C++.
// Whoever waits forever is found: when every fiber has only waited for a long time, `run` returns 1.

#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <vector>

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct Index {
  int x;
};
struct alignas(16) uint4 {
  u32 x, y, z, w;
};

struct alignas(8) uint2 {
  u32 x, y;
};

namespace emulator {

struct Barrier {
  int members = 0, arrived = 0, generation = 0, any = 0, result = 0;
};
struct Warp {
  Barrier barrier;
  u32 slot[32];
  const u32* a[32];
  u32 b[32][2];
};
struct Block {
  Barrier barrier;
  std::vector<Warp> warps;
  std::vector<float> shared;
};
struct Fiber {
  ucontext_t context;  // for the first entry; then jumps, which save no signal mask and cost little
  jmp_buf place;
  bool started = false;
  Index thread, block;
  Block* home;
  Warp* warp;
  bool done = false;
};

static std::vector<Fiber> fibers;
static std::vector<Block> blocks;
static std::vector<Barrier> clusters;
static std::vector<std::unique_ptr<char[]>> stacks;  // kept from run to run, and not filled
constexpr size_t STACK_BYTES = 64 * 1024;
static ucontext_t scheduler;
static jmp_buf scheduler_place;
static Fiber* current;
static Index grid;
static std::function<void()> body;
static bool moved;  // whether any fiber got further in this round

inline void yield() {
  if (!_setjmp(current->place)) _longjmp(scheduler_place, 1);
}

inline int wait(Barrier& barrier, int value = 0) {
  const int generation = barrier.generation;
  barrier.any |= value;
  if (++barrier.arrived == barrier.members) {
    barrier.result = barrier.any;
    barrier.any = barrier.arrived = 0;
    ++barrier.generation;
    moved = true;
  } else {
    while (barrier.generation == generation) yield();
  }
  return barrier.result;
}
inline Warp& sync_warp() {
  wait(current->warp->barrier);
  return *current->warp;
}

inline void trampoline() {
  body();
  current->done = true;
  moved = true;
  // Threads that have returned no longer count in barriers, as on the GPU.
  --current->home->barrier.members;
  --current->warp->barrier.members;
  _longjmp(scheduler_place, 1);
}

inline int run(int blocks_in_grid, int threads, size_t shared_bytes, std::function<void()> kernel) {
  body = kernel;
  grid.x = blocks_in_grid;
  blocks.assign(blocks_in_grid, Block());
  clusters.assign(blocks_in_grid, Barrier());
  fibers.assign(static_cast<size_t>(blocks_in_grid) * threads, Fiber());
  for (int b = 0; b < blocks_in_grid; ++b) {
    Block& block = blocks[b];
    block.barrier.members = threads;
    block.warps.resize(threads / 32);
    block.shared.assign(shared_bytes / 4 + 4, std::numeric_limits<float>::quiet_NaN());
    for (Warp& warp : block.warps) warp.barrier.members = 32;
    for (int t = 0; t < threads; ++t) {
      Fiber& fiber = fibers[static_cast<size_t>(b) * threads + t];
      fiber.thread.x = t;
      fiber.block.x = b;
      fiber.home = &block;
      fiber.warp = &block.warps[t / 32];
      const size_t index = static_cast<size_t>(b) * threads + t;
      if (index == stacks.size()) stacks.emplace_back(new char[STACK_BYTES]);
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = stacks[index].get();
      fiber.context.uc_stack.ss_size = STACK_BYTES;
      fiber.context.uc_link = &scheduler;
      makecontext(&fiber.context, trampoline, 0);
    }
  }
  for (int idle = 0; idle < 10000;) {
    moved = false;
    bool left = false;
    for (size_t index = 0; index < fibers.size(); ++index) {
      static Fiber* next;  // not in a register: it outlives the jumps
      next = &fibers[index];
      Fiber& fiber = *next;
      if (fiber.done) continue;
      left = true;
      current = &fiber;
      if (_setjmp(scheduler_place)) continue;
      if (fiber.started) _longjmp(fiber.place, 1);
      fiber.started = true;
      swapcontext(&scheduler, &fiber.context);
    }
    if (!left) return 0;
    idle = moved ? 0 : idle + 1;
  }
  return 1;
}

inline float* shared_memory_of(Block& block) {
  float* start = block.shared.data();
  while (reinterpret_cast<uintptr_t>(start) % 16) ++start;
  return start;
}
inline float* shared_memory() { return shared_memory_of(*current->home); }

}  // namespace emulator

#define threadIdx (emulator::current->thread)
#define blockIdx (emulator::current->block)
#define gridDim (emulator::grid)

inline void __syncthreads() { emulator::wait(emulator::current->home->barrier); }
inline int __syncthreads_or(int value) {
  return emulator::wait(emulator::current->home->barrier, value != 0);
}
inline void __syncwarp() { emulator::sync_warp(); }

inline u32 __float_as_uint(float value) {
  u32 bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float __uint_as_float(u32 bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline float shuffle_from(float value, int lane) {
  emulator::Warp& warp = emulator::sync_warp();
  warp.slot[threadIdx.x % 32] = __float_as_uint(value);
  emulator::sync_warp();
  const float result = __uint_as_float(warp.slot[lane & 31]);
  emulator::sync_warp();
  return result;
}
inline float __shfl_sync(u32, float value, int lane) { return shuffle_from(value, lane); }
inline float __shfl_xor_sync(u32, float value, int mask) {
  return shuffle_from(value, threadIdx.x % 32 ^ mask);
}
inline u32 __shfl_xor_sync(u32, u32 value, int mask) {
  return __float_as_uint(shuffle_from(__uint_as_float(value), threadIdx.x % 32 ^ mask));
}
inline float __shfl_down_sync(u32, float value, int distance) {
  const int lane = threadIdx.x % 32 + distance;
  return shuffle_from(value, lane < 32 ? lane : threadIdx.x % 32);
}
inline bool __any_sync(u32, bool value) {
  return emulator::wait(emulator::current->warp->barrier, value) != 0;
}
inline u32 max(u32 a, u32 b) { return a > b ? a : b; }
inline float tanh_approximate(float x) { return std::tanh(x); }
inline float __expf(float x) { return std::exp(x); }
inline float exp2_approximate(float x) { return std::exp2(x); }
inline float __fdividef(float a, float b) { return a / b; }

// common.cuh
struct Float16 {
  u16 bits;
};
struct BFloat16 {
  u16 bits;
};
inline float to_float(float value) { return value; }
inline float to_float(BFloat16 value) { return __uint_as_float(static_cast<u32>(value.bits) << 16); }
inline float to_float(Float16 value) {
  _Float16 half;
  std::memcpy(&half, &value, 2);
  return static_cast<float>(half);
}
template <class T>
inline T from_float(float value);
template <>
inline float from_float<float>(float value) {
  return value;
}
template <>
inline Float16 from_float<Float16>(float value) {
  const _Float16 half = static_cast<_Float16>(value);
  Float16 result;
  std::memcpy(&result, &half, 2);
  return result;
}
template <>
inline BFloat16 from_float<BFloat16>(float value) {
  const u32 bits = __float_as_uint(value);
  if (value != value) return {0x7fff};
  return {static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
template <class T>
inline u32 pack_pair(float low, float high) {
  return static_cast<u32>(from_float<T>(low).bits) |
         static_cast<u32>(from_float<T>(high).bits) << 16;
}
template <>
inline u32 pack_pair<float>(float, float) {
  return 0;
}
constexpr int smaller(int a, int b) { return a < b ? a : b; }
constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// machine.cuh
inline void load_shared_by_device(u32 (&word)[4], const void* source) {
  emulator::yield();
  std::memcpy(word, source, 16);
}
inline u32 load_shared_by_device(const u32* source) { return *source; }
inline void store_shared_by_device(void* target, u32 word) {
  std::memcpy(target, &word, 4);
  emulator::moved = true;
}
inline void store_shared_by_device(void* target, u32 first, u32 second) {
  store_shared_by_device(target, first);
  store_shared_by_device(static_cast<char*>(target) + 4, second);
}
inline void store_shared_by_device_if(bool wanted, void* target, u32 word) {
  if (wanted) store_shared_by_device(target, word);
}
inline void store_shared_by_device_if(bool wanted, void* target, u32 first, u32 second) {
  if (wanted) store_shared_by_device(target, first, second);
}
template <class V>
V made_once(V value) {
  return value;
}
template <class V>
V load_if(bool wanted, const V* source) {
  return wanted ? *source : V{};
}
inline void prefetch(const void*) {}

// cluster_machine.cuh; a cluster is SIZE neighbouring blocks, as of a grid of one dimension.
typedef char* SharedAddress;
extern "C" {
int muted_block = -1;  // a block whose stores to others are lost, for tests of what waits for them
}
inline SharedAddress shared_address(const void* place) {
  return static_cast<char*>(const_cast<void*>(place));
}
template <int SIZE>
inline SharedAddress in_block(SharedAddress address, int rank) {
  emulator::Block& there = emulator::blocks[blockIdx.x / SIZE * SIZE + rank];
  return address - reinterpret_cast<char*>(emulator::shared_memory()) +
         reinterpret_cast<char*>(emulator::shared_memory_of(there));
}
inline u64 nanoseconds() {
  static u64 now = 0;
  return now += 10;
}
struct ByteBarrier {
  int bytes;  // that are expected and have not come
  short arrived, round;
};
inline ByteBarrier& barrier_at(SharedAddress place) {
  return *reinterpret_cast<ByteBarrier*>(place);
}
inline void count_bytes(ByteBarrier& barrier, int bytes) {
  barrier.bytes += bytes;
  if (!barrier.arrived || barrier.bytes) return;
  barrier.arrived = 0;
  ++barrier.round;
}
inline void set_up_barrier(SharedAddress place) { barrier_at(place) = {0, 0, 0}; }
inline void expect_bytes(SharedAddress place, u32 bytes) {
  barrier_at(place).arrived = 1;
  count_bytes(barrier_at(place), bytes);
}
inline bool is_complete(SharedAddress place, u32 parity) {
  emulator::yield();
  return static_cast<u32>(barrier_at(place).round & 1) != parity;
}
template <int SIZE, class... Words>
inline void send(SharedAddress target, SharedAddress barrier, Words... words) {
  if (SIZE > 1 && blockIdx.x == muted_block) return;
  const u32 all[] = {words...};
  std::memcpy(target, all, sizeof(all));
  if (SIZE > 1) count_bytes(barrier_at(barrier), -static_cast<int>(sizeof(all)));
  emulator::moved = true;
}
template <int SIZE>
inline void wait_for_cluster() {
  emulator::Barrier& barrier = emulator::clusters[blockIdx.x / SIZE];
  barrier.members = SIZE * static_cast<int>(emulator::current->home->warps.size()) * 32;
  emulator::wait(barrier);
}

inline u32 cycles() {
  static u32 count = 0;
  return count += 100;
}
inline u32 round_to_tf32(float value) {
  if (value != value) return 0x7fffffff;
  return (__float_as_uint(value) + 0x1000) & 0xffffe000;
}
// sum[16][8] += a[16][K] b[K][8] from the registers of all lanes, in PTX's layout, which is the same
// for both types if a word counts as one column (TF32) or two (half precision).
template <class Columns>
inline void multiply_words(float (&sum)[4], const u32* a, u32 b0, u32 b1, Columns product) {
  const int lane = threadIdx.x % 32;
  emulator::Warp& warp = emulator::sync_warp();
  warp.a[lane] = a;
  warp.b[lane][0] = b0;
  warp.b[lane][1] = b1;
  emulator::sync_warp();
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    double total = sum[i];
    for (int quad = 0; quad < 4; ++quad)
      for (int word = 0; word < 2; ++word)
        total += product(warp.a[row % 8 * 4 + quad][word * 2 + row / 8],
                         warp.b[column * 4 + quad][word]);
    sum[i] = static_cast<float>(total);
  }
  emulator::sync_warp();
}
inline void multiply_tf32(float (&sum)[4], const u32* a, u32 b0, u32 b1) {
  multiply_words(sum, a, b0, b1, [](u32 x, u32 y) {
    // The hardware reads 19 bits.
    return static_cast<double>(__uint_as_float(x & 0xffffe000)) * __uint_as_float(y & 0xffffe000);
  });
}
template <class T>
inline void multiply_half(float (&sum)[4], const u32* a, u32 b0, u32 b1) {
  multiply_words(sum, a, b0, b1, [](u32 x, u32 y) {
    const auto half = [](u32 bits) { return double(to_float(T{static_cast<u16>(bits)})); };
    return half(x) * half(y) + half(x >> 16) * half(y >> 16);
  });
}
