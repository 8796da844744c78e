// The sums over rows that dweight and dbias are, where they are not made in backward.cu itself.
//
// hfai_layer_norm_add_partials adds the partial sums of all groups, in order, and rounds once.
//
// plan.py sets: W (type of dweight and dbias) THREADS (a multiple of 32)

constexpr int ROW_LANES = THREADS / 32;

extern "C" __global__ void __launch_bounds__(THREADS)
    hfai_layer_norm_add_partials(const float* __restrict__ first, const float* __restrict__ second,
                                 W* __restrict__ first_sum, W* __restrict__ second_sum,
                                 i64 row_length, i64 groups) {
  wait_for_previous_kernel();
  __shared__ float partial[ROW_LANES][33];
  const int lane = threadIdx.x % 32;
  const int row_lane = threadIdx.x / 32;
  const i64 tiles = (row_length + 31) / 32;  // of 32 columns; those of `second` follow `first`'s
  const bool is_second = blockIdx.x >= tiles;
  const float* __restrict__ source = is_second ? second : first;
  W* __restrict__ target = is_second ? second_sum : first_sum;
  const i64 column = (blockIdx.x - (is_second ? tiles : 0)) * 32 + lane;

  // Not through the read-only cache: the kernel in front may still have been writing when this one
  // started.
  auto read = [&](i64 group) { return __ldcg(source + group * row_length + column); };
  float total = 0.0f;
  if (column < row_length) {
    i64 group = row_lane;
    // Four loads in flight; the additions keep their order.
    for (; group + 3 * ROW_LANES < groups; group += 4 * ROW_LANES) {
      float value[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) value[i] = read(group + i * ROW_LANES);
#pragma unroll
      for (int i = 0; i < 4; ++i) total += value[i];
    }
    for (; group < groups; group += ROW_LANES) total += read(group);
  }
  partial[row_lane][lane] = total;
  __syncthreads();
#pragma unroll
  for (int half = ROW_LANES / 2; half > 0; half /= 2) {
    if (row_lane < half) partial[row_lane][lane] += partial[row_lane + half][lane];
    __syncthreads();
  }
  if (row_lane == 0 && column < row_length) target[column] = from_float<W>(partial[0][lane]);
}
