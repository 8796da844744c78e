// What only Hopper has (sm_90a), besides warpgroup.cuh: barriers that count bytes, the copy engine,
// registers that move between warpgroups, and products of operands with rows of 64 bytes.
// (PTX ISA 9.0: 9.7.13.15 mbarrier, 9.7.9.25 cp.async.bulk, 9.7.15 wgmma, 9.7.19.5 setmaxnreg.)

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}
__device__ __forceinline__ void barrier_init(u64* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count));
}
// Before anybody but the threads of the block, such as the copy engine, uses them.
__device__ __forceinline__ void barriers_are_made() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Arrives, and has the phase wait for that many bytes of `copy_bytes` too.
__device__ __forceinline__ void barrier_expect(u64* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                   shared_address(barrier)),
               "r"(bytes)
               : "memory");
}
// Waits until the phase of this parity is over; that before the first has parity 1.
__device__ __forceinline__ void barrier_wait(u64* barrier, u32 parity) {
  u32 done = 0;
  while (!done)
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.b32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
}
// From global to shared memory by the copy engine; addresses and bytes are multiples of 16.
__device__ __forceinline__ void copy_bytes(char* target, const char* source, int bytes, u64* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(target)),
      "l"(__cvta_generic_to_global(source)), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// By all threads of a warpgroup.
template <int COUNT>
__device__ __forceinline__ void keep_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void ask_for_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Rows of 64 bytes, groups of eight 512 bytes apart; 2 is the 64-byte swizzle.
__device__ __forceinline__ u64 of_rows(u32 operand) {
  return static_cast<u64>(2u << 30 | 8 * ROW_BYTES / 16) << 32 | operand;
}
#define PRODUCT_64_128(C, ADDS)                                                                   \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"                                    \
               "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" SUM_128                   \
               "}, %64, %65, add, 1, 1, 0, 0;\n}"                                                  \
               : TILES_128(C)                                                                      \
               : "l"(of_rows(a)), "l"(of_rows(b)), "n"(ADDS)                                       \
               : "memory")
// sum[64][128] = a[64][16] b[128][16]^T, added to what it is where ADD.
template <bool ADD>
__device__ __forceinline__ void multiply(float (&sum)[16][4], u32 a, u32 b) {
  if constexpr (ADD)
    PRODUCT_64_128("+f", 1);
  else
    PRODUCT_64_128("=f", 0);
}
