// Matrix products of a warpgroup (four warps, the first a multiple of four) on Hopper: sm_90a only.
//
// They read operands from shared memory by themselves, through descriptors, and run beside the
// warps until these wait. Both operands' rows are 128 bytes (64 elements of half precision) that
// start on multiples of 128 bytes, tiles of eight rows on multiples of 1024; 16-byte piece p of row
// r lies at piece p ^ (r % 8), which is the hardware's 128-byte swizzle. An operand lies by rows, with
// the summed dimension along memory's rows, or by columns, with it across them.
//
// Rules of use: `fence_written_operands` by every thread that wrote an operand, before the barrier
// behind which products read it; `begin_products` before the first product after registers of sums or
// operands changed; `end_products` closes a batch; sums and operands are untouched until
// `wait_products<PENDING>` has left at most PENDING batches open, then `hold` of the sums before use.
// (PTX ISA 9.0, 9.7.15, "Asynchronous warpgroup level matrix instructions".)

constexpr int SWIZZLED_ROW_BYTES = 128;

// Where piece `piece` (16 bytes) of row `row` lies, in bytes from the start of the tile.
__host__ __device__ constexpr int swizzled(int row, int piece) {
  return row * SWIZZLED_ROW_BYTES + (piece ^ row % 8) * 16;
}

// An operand that starts at `tile`: the descriptor's lower word. Bits 0-13: the address / 16; 16-29:
// bytes between blocks of 64 columns / 16 (there is one block, so unused).
__device__ __forceinline__ u32 describe(const void* tile) {
  const u32 address = static_cast<u32>(__cvta_generic_to_shared(tile));
  return (address & 0x3ffffu) >> 4 | 1u << 16;
}
// The operand `bytes` further, a multiple of 16.
__device__ __forceinline__ u32 advanced(u32 operand, int bytes) { return operand + bytes / 16; }
// Bits 32-45: bytes between groups of eight rows / 16; 62-63: 1, the 128-byte swizzle.
__device__ __forceinline__ u64 descriptor(u32 operand) {
  return static_cast<u64>(1u << 30 | 8 * SWIZZLED_ROW_BYTES / 16) << 32 | operand;
}
// Keeps the compiler from computing what follows from an operand ahead, in many registers.
__device__ __forceinline__ u32 opaque(u32 operand) {
  asm volatile("" : "+r"(operand));
  return operand;
}

__device__ __forceinline__ void fence_written_operands() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void end_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int PENDING>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Keeps the compiler from moving what is done with sums across this place.
template <int TILES>
__device__ __forceinline__ void hold(float (&sum)[TILES][4]) {
#pragma unroll
  for (int t = 0; t < TILES; ++t)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(sum[t][i])::"memory");
}

// Starts bringing memory to the second-level cache, by one instruction: multiples of 16 bytes.
__device__ __forceinline__ void prefetch_bytes(const void* source, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(source)),
               "r"(bytes)
               : "memory");
}

// The index of a thread's warpgroup, in a register that the compiler knows to be the warp's.
__device__ __forceinline__ int warpgroup_index() {
  return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 128), 0);
}

// sum[64][N] = a[64][16] b[16][N], added to what it is where ADD. Rows 16 w to 16 w + 15 are warp w's,
// laid out as `multiply_half` has them, N / 8 tiles side by side; so is `a` in registers. BY_COLUMNS
// says that the summed dimension goes across memory's rows.
template <class T, int N>
struct WarpgroupProduct;

#define SUM_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define SUM_32 SUM_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define SUM_48 SUM_32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define SUM_64 SUM_48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define SUM_80 SUM_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define SUM_96 SUM_80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define SUM_112 SUM_96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define SUM_128 SUM_112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define TILE(C, t) C(sum[t][0]), C(sum[t][1]), C(sum[t][2]), C(sum[t][3])
#define TILES_16(C) TILE(C, 0), TILE(C, 1)
#define TILES_32(C) TILES_16(C), TILE(C, 2), TILE(C, 3)
#define TILES_48(C) TILES_32(C), TILE(C, 4), TILE(C, 5)
#define TILES_64(C) TILES_48(C), TILE(C, 6), TILE(C, 7)
#define TILES_80(C) TILES_64(C), TILE(C, 8), TILE(C, 9)
#define TILES_96(C) TILES_80(C), TILE(C, 10), TILE(C, 11)
#define TILES_112(C) TILES_96(C), TILE(C, 12), TILE(C, 13)
#define TILES_128(C) TILES_112(C), TILE(C, 14), TILE(C, 15)

// Both operands from shared memory, or `a` from registers. I0 to I6 number what follows the sums;
// their constraint C is "=f" where nothing is added, so that what registers held need not be kept.
#define FROM_MEMORY(NAME, N, C, ADDS, I0, I1, I2, I3, I4)                                          \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " I2                                          \
               ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" SUM_##N  \
               "}, " I0 ", " I1 ", add, 1, 1, " I3 ", " I4 ";\n}"                                  \
               : TILES_##N(C)                                                                      \
               : "l"(descriptor(a)), "l"(descriptor(b)), "n"(ADDS), "n"(A_BY_COLUMNS ? 1 : 0), "n"(B_BY_COLUMNS ? 1 : 0)   \
               : "memory")
#define FROM_REGISTERS(NAME, N, C, ADDS, I0, I1, I2, I3, I4, I5, I6)                               \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " I5                                          \
               ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" SUM_##N  \
               "}, {" I0 ", " I1 ", " I2 ", " I3 "}, " I4 ", add, 1, 1, " I6 ";\n}"                \
               : TILES_##N(C)                                                                      \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor(b)), "n"(ADDS),                    \
                 "n"(B_BY_COLUMNS ? 1 : 0)                                                         \
               : "memory")
#define WARPGROUP_PRODUCT(TYPE, NAME, N, I0, I1, I2, I3, I4, I5, I6)                               \
  template <>                                                                                      \
  struct WarpgroupProduct<TYPE, N> {                                                               \
    template <bool ADD, bool A_BY_COLUMNS, bool B_BY_COLUMNS>                                      \
    static __device__ __forceinline__ void run(float (&sum)[N / 8][4], u32 a, u32 b) {             \
      if constexpr (ADD)                                                                           \
        FROM_MEMORY(NAME, N, "+f", 1, I0, I1, I2, I3, I4);                                         \
      else                                                                                         \
        FROM_MEMORY(NAME, N, "=f", 0, I0, I1, I2, I3, I4);                                         \
    }                                                                                              \
    template <bool ADD, bool B_BY_COLUMNS>                                                         \
    static __device__ __forceinline__ void run(float (&sum)[N / 8][4], const u32 (&a)[4], u32 b) { \
      if constexpr (ADD)                                                                           \
        FROM_REGISTERS(NAME, N, "+f", 1, I0, I1, I2, I3, I4, I5, I6);                              \
      else                                                                                         \
        FROM_REGISTERS(NAME, N, "=f", 0, I0, I1, I2, I3, I4, I5, I6);                              \
    }                                                                                              \
  };
#define WARPGROUP_PRODUCTS(TYPE, NAME)                                                             \
  WARPGROUP_PRODUCT(TYPE, NAME, 16, "%8", "%9", "%10", "%11", "%12", "%13", "%14")                 \
  WARPGROUP_PRODUCT(TYPE, NAME, 32, "%16", "%17", "%18", "%19", "%20", "%21", "%22")               \
  WARPGROUP_PRODUCT(TYPE, NAME, 48, "%24", "%25", "%26", "%27", "%28", "%29", "%30")               \
  WARPGROUP_PRODUCT(TYPE, NAME, 64, "%32", "%33", "%34", "%35", "%36", "%37", "%38")               \
  WARPGROUP_PRODUCT(TYPE, NAME, 80, "%40", "%41", "%42", "%43", "%44", "%45", "%46")               \
  WARPGROUP_PRODUCT(TYPE, NAME, 96, "%48", "%49", "%50", "%51", "%52", "%53", "%54")               \
  WARPGROUP_PRODUCT(TYPE, NAME, 112, "%56", "%57", "%58", "%59", "%60", "%61", "%62")              \
  WARPGROUP_PRODUCT(TYPE, NAME, 128, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
WARPGROUP_PRODUCTS(BFloat16, "bf16")
WARPGROUP_PRODUCTS(Float16, "f16")
