// Copies a matrix into one with wider rows; the rest of each row is zeros, but for one column of ones
// if there is to be one (a product with that column sums over rows).

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hfai_rnn_pad(const T* source, T* target, i64 columns, i64 source_pitch, i64 target_pitch,
                 i64 ones) {
  source += blockIdx.x * source_pitch;
  target += blockIdx.x * target_pitch;
  for (i64 i = threadIdx.x; i < target_pitch; i += THREADS)
    target[i] = i < columns ? source[i] : from_float<T>(i == ones ? 1.0f : 0.0f);
}
