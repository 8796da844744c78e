// The instructions that the recurrent kernels need and CUDA C++ has no word for, beside those of
// tensor_cores.cuh: loads and stores that other multiprocessors see without a barrier.

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

// A value for those lanes that want one, zero for the others. What was asked for so is waited for where
// it is used, and not where a branch around it would end.
__device__ __forceinline__ float load_if(bool wanted, const float* source) {
  float value;
  asm volatile(
      "{.reg .pred wanted; setp.ne.u32 wanted, %1, 0; mov.b32 %0, 0; @wanted ld.global.f32 %0, [%2];}"
      : "=f"(value)
      : "r"(static_cast<u32>(wanted)), "l"(source)
      : "memory");
  return value;
}
template <class H>
__device__ __forceinline__ H load_if(bool wanted, const H* source) {
  H value;
  asm volatile(
      "{.reg .pred wanted; setp.ne.u32 wanted, %1, 0; mov.b16 %0, 0; @wanted ld.global.b16 %0, [%2];}"
      : "=h"(value.bits)
      : "r"(static_cast<u32>(wanted)), "l"(source)
      : "memory");
  return value;
}

// The same, by those lanes alone that want to: a predicate, and no branch around it.
__device__ __forceinline__ void store_shared_by_device_if(bool wanted, void* target, u32 word) {
  asm volatile("{.reg .pred wanted; setp.ne.u32 wanted, %0, 0; @wanted st.relaxed.gpu.global.u32 [%1], %2;}"
               ::"r"(static_cast<u32>(wanted)), "l"(target), "r"(word)
               : "memory");
}
__device__ __forceinline__ void store_shared_by_device_if(bool wanted, void* target, u32 first,
                                                          u32 second) {
  asm volatile(
      "{.reg .pred wanted; setp.ne.u32 wanted, %0, 0; @wanted st.relaxed.gpu.global.v2.u32 [%1], {%2, %3};}"
      ::"r"(static_cast<u32>(wanted)), "l"(target), "r"(first), "r"(second)
      : "memory");
}

// The compiler makes values anew wherever they are used, rather than keep them in a register, as soon
// as registers are few: a value that has passed here is not made anew.
template <class V>
__device__ __forceinline__ V made_once(V value) {
  if constexpr (sizeof(V) == 8)
    asm("" : "+l"(value));
  else
    asm("" : "+r"(value));
  return value;
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
