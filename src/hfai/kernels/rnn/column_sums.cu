// Sums over rows of an fp32 matrix, each range of `rows_at_once` rows by itself: sums [ranges][columns].
// Run again over the ranges' sums, it adds them up. Chains of additions stay short, and their order is
// fixed.

constexpr int ROW_LANES = SUM_THREADS / 32;

extern "C" __global__ void __launch_bounds__(SUM_THREADS, 1)
    hfai_rnn_column_sums(const float* matrix, float* sums, i64 rows, i64 columns, i64 pitch,
                         i64 rows_at_once) {
  __shared__ float partial[ROW_LANES][33];
  const int lane = threadIdx.x % 32, row_lane = threadIdx.x / 32;
  const i64 tiles = (columns + 31) / 32;
  const i64 range = blockIdx.x / tiles, column = blockIdx.x % tiles * 32 + lane;
  const i64 first = range * rows_at_once, end = min(rows, first + rows_at_once);
  float total = 0.0f;
  if (column < columns) {
#pragma unroll 8
    for (i64 row = first + row_lane; row < end; row += ROW_LANES)
      total += matrix[row * pitch + column];
  }
  partial[row_lane][lane] = total;
  __syncthreads();
  if (row_lane == 0 && column < columns) {
#pragma unroll
    for (int i = 1; i < ROW_LANES; ++i) total += partial[i][lane];
    sums[range * columns + column] = total;
  }
}
