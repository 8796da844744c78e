// What every kernel here starts from: number types, vector access, asynchronous copies and sums over
// the threads that share a row. jit.py puts this text in front of an operator's own source, so it
// includes nothing (headers are what makes run-time compilation slow).

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct Float16 {
  u16 bits;
};
struct BFloat16 {
  u16 bits;
};

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(BFloat16 value) {
  return __uint_as_float(static_cast<u32>(value.bits) << 16);
}
__device__ __forceinline__ float to_float(Float16 value) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
}

template <class T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ Float16 from_float<Float16>(float value) {
  Float16 result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
  return result;
}
template <>
__device__ __forceinline__ BFloat16 from_float<BFloat16>(float value) {
  BFloat16 result;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
  return result;
}

// Two conversions in one instruction; `low` lands in the lower half, that is, first in memory.
template <class T>
__device__ __forceinline__ u32 pack_pair(float low, float high);
template <>
__device__ __forceinline__ u32 pack_pair<Float16>(float low, float high) {
  u32 result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}
template <>
__device__ __forceinline__ u32 pack_pair<BFloat16>(float low, float high) {
  u32 result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}
template <>
__device__ __forceinline__ u32 pack_pair<float>(float, float) {
  return 0;  // never reached: fp32 is stored as it is
}

__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }
__host__ __device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int power_of_two_from(int n) {
  return n <= 1 ? 1 : 2 * power_of_two_from(ceil_div(n, 2));
}

// LENGTH elements that lie side by side in memory and are moved in pieces of at most 16 bytes.
template <class T, int LENGTH>
struct Vector {
  static constexpr int BYTES = LENGTH * static_cast<int>(sizeof(T));
  static constexpr int PIECE = smaller(BYTES, 16);
  static constexpr int PIECES = BYTES / PIECE;
  static_assert(BYTES == PIECE * PIECES, "a vector is a whole number of pieces");
  alignas(PIECE) T element[LENGTH];

  __device__ __forceinline__ float operator[](int i) const { return to_float(element[i]); }
};

template <int BYTES>
struct PieceType;
template <>
struct PieceType<2> {
  typedef u16 type;
};
template <>
struct PieceType<4> {
  typedef u32 type;
};
template <>
struct PieceType<8> {
  typedef uint2 type;
};
template <>
struct PieceType<16> {
  typedef uint4 type;
};

// Loads and stores of whole vectors. ALIGNED says whether the address lies on a multiple of the
// piece; otherwise elements move one by one (and land in the same places, so that alignment never
// changes a result). The policies say what the caches should do with what passes through.
struct KeepInCache {
  template <class Piece>
  static __device__ __forceinline__ Piece load(const Piece* source) {
    return __ldg(source);
  }
  template <class Piece>
  static __device__ __forceinline__ void store(Piece* target, Piece value) {
    *target = value;
  }
};
// First to be evicted: what is read or written once must not push out what every row reads.
struct EvictFirst {
  template <class Piece>
  static __device__ __forceinline__ Piece load(const Piece* source) {
    return __ldcs(source);
  }
  template <class Piece>
  static __device__ __forceinline__ void store(Piece* target, Piece value) {
    __stcs(target, value);
  }
};
// Asked for in this order and not later. `__ldg` promises that the memory never changes, and the
// compiler then moves the load down to its first use, past barriers; volatile ones stay in order.
struct InOrder {
  static __device__ __forceinline__ uint4 load(const uint4* source) {
    uint4 value;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(__cvta_generic_to_global(source)));
    return value;
  }
  static __device__ __forceinline__ uint2 load(const uint2* source) {
    uint2 value;
    asm volatile("ld.volatile.global.v2.u32 {%0, %1}, [%2];"
                 : "=r"(value.x), "=r"(value.y)
                 : "l"(__cvta_generic_to_global(source)));
    return value;
  }
  static __device__ __forceinline__ u32 load(const u32* source) {
    u32 value;
    asm volatile("ld.volatile.global.u32 %0, [%1];"
                 : "=r"(value)
                 : "l"(__cvta_generic_to_global(source)));
    return value;
  }
  static __device__ __forceinline__ u16 load(const u16* source) {
    u16 value;
    asm volatile("ld.volatile.global.u16 %0, [%1];"
                 : "=h"(value)
                 : "l"(__cvta_generic_to_global(source)));
    return value;
  }
};

template <class Policy, bool ALIGNED, class T, int LENGTH>
__device__ __forceinline__ Vector<T, LENGTH> load_vector(const T* source) {
  Vector<T, LENGTH> result;
  if constexpr (ALIGNED) {
    typedef typename PieceType<Vector<T, LENGTH>::PIECE>::type Piece;
#pragma unroll
    for (int i = 0; i < Vector<T, LENGTH>::PIECES; ++i)
      reinterpret_cast<Piece*>(&result)[i] =
          Policy::load(reinterpret_cast<const Piece*>(source) + i);
  } else {
#pragma unroll
    for (int i = 0; i < LENGTH; ++i) result.element[i] = source[i];
  }
  return result;
}
template <bool ALIGNED, class T, int LENGTH>
__device__ __forceinline__ Vector<T, LENGTH> load_kept(const T* source) {
  return load_vector<KeepInCache, ALIGNED, T, LENGTH>(source);
}
template <bool ALIGNED, class T, int LENGTH>
__device__ __forceinline__ Vector<T, LENGTH> load_in_order(const T* source) {
  return load_vector<InOrder, ALIGNED, T, LENGTH>(source);
}
template <bool ALIGNED, class T, int LENGTH>
__device__ __forceinline__ Vector<T, LENGTH> load_once(const T* source) {
  return load_vector<EvictFirst, ALIGNED, T, LENGTH>(source);
}

template <class Policy, bool ALIGNED, class T, int LENGTH>
__device__ __forceinline__ void store_vector(T* target, const float (&value)[LENGTH]) {
  Vector<T, LENGTH> vector;
  if constexpr (sizeof(T) == 2 && LENGTH % 2 == 0) {
#pragma unroll
    for (int i = 0; i < LENGTH; i += 2)
      reinterpret_cast<u32*>(&vector)[i / 2] = pack_pair<T>(value[i], value[i + 1]);
  } else {
#pragma unroll
    for (int i = 0; i < LENGTH; ++i) vector.element[i] = from_float<T>(value[i]);
  }
  if constexpr (ALIGNED) {
    typedef typename PieceType<Vector<T, LENGTH>::PIECE>::type Piece;
#pragma unroll
    for (int i = 0; i < Vector<T, LENGTH>::PIECES; ++i)
      Policy::store(reinterpret_cast<Piece*>(target) + i,
                    reinterpret_cast<const Piece*>(&vector)[i]);
  } else {
#pragma unroll
    for (int i = 0; i < LENGTH; ++i) target[i] = vector.element[i];
  }
}
template <bool ALIGNED, class T, int LENGTH>
__device__ __forceinline__ void store_once(T* target, const float (&value)[LENGTH]) {
  store_vector<EvictFirst, ALIGNED, T, LENGTH>(target, value);
}
template <bool ALIGNED, class T, int LENGTH>
__device__ __forceinline__ void store_kept(T* target, const float (&value)[LENGTH]) {
  store_vector<KeepInCache, ALIGNED, T, LENGTH>(target, value);
}

// value * weight + bias, rounded as one fused operation where there are both.
template <bool HAS_WEIGHT, bool HAS_BIAS, class V>
__device__ __forceinline__ float scale_and_shift(float value, const V& weight, const V& bias,
                                                 int e) {
  if constexpr (HAS_WEIGHT && HAS_BIAS)
    return __fmaf_rn(value, weight[e], bias[e]);
  else if constexpr (HAS_WEIGHT)
    return __fmul_rn(value, weight[e]);
  else if constexpr (HAS_BIAS)
    return __fadd_rn(value, bias[e]);
  else
    return value;
}

// Global to shared memory without passing through registers (sm_80 and later).
template <int BYTES>
__device__ __forceinline__ void copy_async(void* shared_target, const void* source) {
  const u32 target = static_cast<u32>(__cvta_generic_to_shared(shared_target));
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(target), "l"(source), "n"(BYTES)
                 : "memory");
}
__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int PENDING>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Shared memory as each thread's own array of vectors, in a layout [vector][piece][thread] that is
// free of bank conflicts. A thread reads what it copied itself, so no barrier is needed between.
template <class V, int THREADS>
__device__ __forceinline__ char* piece_at(char* base, int vector, int piece) {
  return base + ((vector * V::PIECES + piece) * THREADS + static_cast<int>(threadIdx.x)) * V::PIECE;
}
template <class V, int THREADS>
__device__ __forceinline__ void copy_vector_async(char* base, int vector, const void* source) {
#pragma unroll
  for (int p = 0; p < V::PIECES; ++p)
    copy_async<larger(4, V::PIECE)>(piece_at<V, THREADS>(base, vector, p),
                                    static_cast<const char*>(source) + p * V::PIECE);
}
template <class V, int THREADS>
__device__ __forceinline__ V read_vector(char* base, int vector) {
  typedef typename PieceType<V::PIECE>::type Piece;
  V result;
#pragma unroll
  for (int p = 0; p < V::PIECES; ++p)
    reinterpret_cast<Piece*>(&result)[p] =
        *reinterpret_cast<const Piece*>(piece_at<V, THREADS>(base, vector, p));
  return result;
}
template <class V, int THREADS>
__device__ __forceinline__ void write_vector(char* base, int vector, const V& value) {
  typedef typename PieceType<V::PIECE>::type Piece;
#pragma unroll
  for (int p = 0; p < V::PIECES; ++p)
    *reinterpret_cast<Piece*>(piece_at<V, THREADS>(base, vector, p)) =
        reinterpret_cast<const Piece*>(&value)[p];
}

// The sum of N numbers as a tree: a chain of additions would be N long. (By recursion: loops that
// halve are not always unrolled, and the array would go to memory.)
template <int N, int LENGTH>
__device__ __forceinline__ float tree_sum(float (&value)[LENGTH]) {
  if constexpr (N == 1) {
    return value[0];
  } else {
    constexpr int HALF = ceil_div(N, 2);
#pragma unroll
    for (int i = 0; i < N - HALF; ++i) value[i] += value[i + HALF];
    return tree_sum<HALF>(value);
  }
}

// A barrier among `threads` threads of a block; `id` tells groups apart (0 is __syncthreads' own).
__device__ __forceinline__ void barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// A kernel launched with `overlap` may start before the one in front of it has ended: as soon as all
// that one's blocks have called `let_next_kernel_start`. It waits for its end, and for all it wrote,
// in `wait_for_previous_kernel`. The cost of a launch is so hidden behind the kernel in front.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}
__device__ __forceinline__ void cluster_barrier() {
#if __CUDA_ARCH__ >= 900
  __syncwarp();  // `.aligned` asks for whole warps
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
// Writes to the shared memory of block `rank` of the cluster, at the place `target` has in ours.
__device__ __forceinline__ void cluster_store(float* target, u32 rank, float value) {
#if __CUDA_ARCH__ >= 900
  const u32 here = static_cast<u32>(__cvta_generic_to_shared(target));
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(value) : "memory");
#endif
}

// A sum as a binary tree, neighbours first. A -0.0f changes nothing, not even a zero's sign: with it in
// place of what is missing, the numbers from the start of a power of two on can be added elsewhere.
// (Recursion, since not every compiler unrolls a loop that doubles.)
template <int N, int LENGTH>
__device__ __forceinline__ float neighbour_sum(float (&value)[LENGTH]) {
  if constexpr (N == 1) {
    return value[0];
  } else {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) value[i] = value[2 * i] + value[2 * i + 1];
    if constexpr (N % 2) value[N / 2] = value[N - 1];
    return neighbour_sum<ceil_div(N, 2)>(value);
  }
}

// Sums over the LANES lanes of a block, in CLUSTER blocks, that share a row. A lane is GROUPS threads,
// a power of two, that lie side by side; with one thread a lane, THREADS / LANES rows are summed side
// by side. Every thread gets the sum, with the same bits, since each adds the same numbers in the same
// tree: neighbours first, threads and then warps. Sums alternate between two sets of shared memory: a
// thread may still read the last sum's while another writes the next one's, and the barrier keeps it
// from going on.
template <int COUNT, int LANES, int THREADS, int CLUSTER, int GROUPS = 1>
struct RowSum {
  static constexpr int SHARING = LANES * GROUPS;  // threads that share a row
  static constexpr int WARPS = ceil_div(SHARING, 32);
  static constexpr int SLOTS = GROUPS > 1 ? 1 : THREADS / LANES;
  static_assert(LANES <= 32 || LANES % 32 == 0, "rows share whole warps");
  static_assert(SLOTS == 1 || LANES <= 32 || SLOTS < 16, "a block has 16 barriers");
  static_assert(CLUSTER == 1 || (SLOTS == 1 && THREADS >= CLUSTER), "a cluster shares one row");

  struct Shared {
    // A thread reads the warps' sums four at a time.
    __align__(WARPS % 4 == 0 ? 16 : 4) float warps[2][SLOTS][COUNT][WARPS];
    float blocks[2][CLUSTER][COUNT];
  };

  Shared* shared;
  int turn = 0;

  __device__ explicit RowSum(Shared* memory) : shared(memory) {
    if constexpr (CLUSTER > 1) cluster_barrier();  // every block runs before any is written to
  }

  __device__ __forceinline__ void operator()(float (&value)[COUNT]) {
#pragma unroll
    for (int offset = 1; offset < smaller(SHARING, 32); offset *= 2)
#pragma unroll
      for (int i = 0; i < COUNT; ++i) value[i] += __shfl_xor_sync(0xffffffffu, value[i], offset);
    if constexpr (WARPS > 1) {
      const int slot = SLOTS > 1 ? threadIdx.x / LANES : 0;
      const int warp = (SLOTS > 1 ? threadIdx.x % LANES : threadIdx.x) / 32;
      float(&partial)[COUNT][WARPS] = shared->warps[turn][slot];
      if (threadIdx.x % 32 == 0)
#pragma unroll
        for (int i = 0; i < COUNT; ++i) partial[i][warp] = value[i];
      if constexpr (SLOTS == 1)
        __syncthreads();
      else
        barrier(1 + slot, LANES);
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        float warps[WARPS];
#pragma unroll
        for (int w = 0; w < WARPS; ++w) warps[w] = partial[i][w];
        value[i] = neighbour_sum<WARPS>(warps);
      }
    }
    if constexpr (CLUSTER > 1) {
      float(&partial)[CLUSTER][COUNT] = shared->blocks[turn];
      if (threadIdx.x < CLUSTER)
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
          cluster_store(&partial[cluster_rank()][i], threadIdx.x, value[i]);
      cluster_barrier();
#pragma unroll
      for (int i = 0; i < COUNT; ++i) value[i] = partial[0][i];
#pragma unroll
      for (int block = 1; block < CLUSTER; ++block)
#pragma unroll
        for (int i = 0; i < COUNT; ++i) value[i] += partial[block][i];
    }
    turn ^= 1;
  }
};
