// The instructions that the recurrent kernels need and CUDA C++ has no word for: matrix products of
// one warp, and loads and stores that other multiprocessors see without a barrier.

// Relaxed accesses at device scope bypass the first-level cache. Each 32-bit word arrives whole;
// nothing is promised of the order of different words, so every word must tell by itself whether
// it has arrived.
__device__ __forceinline__ void load_shared_by_device(u32 (&word)[4], const void* source) {
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
               : "l"(source)
               : "memory");
}
__device__ __forceinline__ u32 load_shared_by_device(const u32* source) {
  u32 word;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(source) : "memory");
  return word;
}
__device__ __forceinline__ void store_shared_by_device(void* target, u32 word) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(target), "r"(word) : "memory");
}
__device__ __forceinline__ void store_shared_by_device(void* target, u32 first, u32 second) {
  asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(target), "r"(first), "r"(second)
               : "memory");
}

// Asks for what a later step will read, so that it comes from the second-level cache then.
__device__ __forceinline__ void prefetch(const void* source) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(source));
}
__device__ __forceinline__ u32 cycles() {
  u32 count;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(count));
  return count;
}

// fp32 rounded to the nearest value with TF32's 10 bits of mantissa; the others are zero.
__device__ __forceinline__ u32 round_to_tf32(float value) {
  u32 result;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(result) : "f"(value));
  return result;
}

// sum[16][8] += a[16][K] b[K][8] by the whole warp. With g = lane / 4 and q = lane % 4, a holds rows
// g, g + 8, g, g + 8 and b column g; sum holds row g, columns 2q and 2q + 1, then row g + 8. Which
// of the K columns a register stands for is free, so long as a and b agree: see fragments.cuh.
__device__ __forceinline__ void multiply_tf32(float (&sum)[4], const u32* a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <class T>
__device__ __forceinline__ void multiply_half(float (&sum)[4], const u32* a, u32 b0, u32 b1);
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
