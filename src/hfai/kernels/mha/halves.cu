// Two fp32 matrices as fp16 ones times a power of two each: of an element down to 2^-28 of its matrix's
// largest as many bits are left as TF32 leaves, of smaller ones what is above 2^-39 of the largest.
// (attention/scaled.cuh says why.) First the largest finite elements, as bits, which order as the
// numbers do; then the elements, and in `back` what brings a product of the two back.

constexpr int VECTOR = 4;

__device__ __forceinline__ u32 size_of(float value) {
  const u32 bits = __float_as_uint(value) & 0x7fffffffu;
  return bits < 0x7f800000u ? bits : 0u;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    hfai_largest(const float* a, const float* b, u32* largest, i64 a_vectors, i64 b_vectors) {
  const i64 first = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
  const i64 step = static_cast<i64>(gridDim.x) * THREADS;
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    const float* const source = which == 0 ? a : b;
    const i64 count = which == 0 ? a_vectors : b_vectors;
    u32 most = 0;
#pragma unroll 4
    for (i64 i = first; i < count; i += step) {
      const Vector<float, VECTOR> vector = load_kept<true, float, VECTOR>(source + i * VECTOR);
#pragma unroll
      for (int e = 0; e < VECTOR; ++e) most = max(most, size_of(vector[e]));
    }
    most = __reduce_max_sync(0xffffffffu, most);
    if (threadIdx.x % 32 == 0) atomicMax(largest + which, most);
  }
}

// The largest is brought to between 2^14 and 2^15.
__device__ __forceinline__ u32 scale_exponent(u32 largest) { return min(268u - (largest >> 23), 253u); }

extern "C" __global__ void __launch_bounds__(THREADS)
    hfai_to_halves(const float* a, const float* b, Float16* a_half, Float16* b_half,
                   const u32* largest, float* back, i64 a_vectors, i64 b_vectors) {
  const i64 first = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
  const i64 step = static_cast<i64>(gridDim.x) * THREADS;
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    const u32 exponent = scale_exponent(largest[which]);
    const float scale = __uint_as_float(exponent << 23);
    if (first == 0) back[which] = __uint_as_float((254u - exponent) << 23);
    const float* const source = which == 0 ? a : b;
    Float16* const target = which == 0 ? a_half : b_half;
    const i64 count = which == 0 ? a_vectors : b_vectors;
#pragma unroll 4
    for (i64 i = first; i < count; i += step) {
      const Vector<float, VECTOR> vector = load_kept<true, float, VECTOR>(source + i * VECTOR);
      uint2 pair;
      pair.x = pack_pair<Float16>(vector[0] * scale, vector[1] * scale);
      pair.y = pack_pair<Float16>(vector[2] * scale, vector[3] * scale);
      *reinterpret_cast<uint2*>(target + i * VECTOR) = pair;
    }
  }
}
