// Matrix products of one warp, and the loads that lay operands out for them: the instructions that
// CUDA C++ has no word for.

// fp32 rounded to the nearest value with TF32's 10 bits of mantissa; the others are zero.
__device__ __forceinline__ u32 round_to_tf32(float value) {
  u32 result;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(result) : "f"(value));
  return result;
}

// sum[16][8] += a[16][K] b[K][8] by the whole warp. With g = lane / 4 and q = lane % 4, a holds rows
// g, g + 8, g, g + 8 and b column g; sum holds row g, columns 2q and 2q + 1, then row g + 8. Which
// of the K columns a register stands for is free, so long as a and b agree.
__device__ __forceinline__ void multiply_tf32(float (&sum)[4], const u32* a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <class T>
__device__ __forceinline__ void multiply_half(float (&)[4], const u32*, u32, u32) {}  // no such type
template <>
__device__ __forceinline__ void multiply_half<BFloat16>(float (&sum)[4], const u32* a, u32 b0,
                                                        u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void multiply_half<Float16>(float (&sum)[4], const u32* a, u32 b0,
                                                       u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8 x 16-byte matrices from shared memory. Lane l gives the address of row l % 8 of matrix
// l / 8; register i gets, of matrix i, the word `lane % 4` of row `lane / 4`. Transposed, where
// elements have two bytes: rows 2 (lane % 4) and the next one of column `lane / 4`.
__device__ __forceinline__ void load_matrices(u32 (&word)[4], const void* row) {
  const u32 address = static_cast<u32>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
               : "r"(address));
}
__device__ __forceinline__ void load_matrices_transposed(u32 (&word)[4], const void* row) {
  const u32 address = static_cast<u32>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
               : "r"(address));
}

// 16 bytes from global to shared memory without passing through registers, or 16 bytes of zeros, for
// which nothing is read.
__device__ __forceinline__ void copy_async_or_zeros(void* target, const void* source, bool copy) {
  const u32 address = static_cast<u32>(__cvta_generic_to_shared(target));
  const u32 bytes = copy ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(source),
               "r"(bytes)
               : "memory");
}

// 16 bytes from global memory that nobody writes, or zeros, for which nothing is read. In this order and
// not later: the compiler may not move it.
__device__ __forceinline__ void load_16_bytes_or_zeros(float (&value)[4], const float* source,
                                                       bool load) {
#pragma unroll
  for (int i = 0; i < 4; ++i) value[i] = 0.0f;
  asm volatile(
      "{\n.reg .pred load;\nsetp.ne.b32 load, %5, 0;\n"
      "@load ld.global.nc.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];\n}"
      : "+f"(value[0]), "+f"(value[1]), "+f"(value[2]), "+f"(value[3])
      : "l"(__cvta_generic_to_global(source)), "r"(load ? 1 : 0));
}
// Starts bringing the line of 128 bytes around an address to the second-level cache.
__device__ __forceinline__ void prefetch_line(const void* source) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(source)));
}

// 16 bytes to global memory in one instruction: the compiler takes a plain store apart where the words
// don't lie in neighbouring registers.
__device__ __forceinline__ void store_16_bytes(void* target, const u32 (&word)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(target)),
               "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3])
               : "memory");
}

__device__ __forceinline__ float tanh_approximate(float value) {
  float result;
  asm("tanh.approx.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

// 2 to the power of value, relative error 2^-22; results below 2^-126 are zero.
__device__ __forceinline__ float exp2_approximate(float value) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}
