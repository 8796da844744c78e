// Adds up what product.cu made of `splits` ranges of the summed dimension, in their order.
// parts [splits][m][n], dense; out's rows are `pitch` apart; `bias` [n] or 0; `add`: to what is there.

extern "C" __global__ void __launch_bounds__(SUM_THREADS, 1)
    hfai_products_sum(const float* parts, float* out, const float* bias, i64 m, i64 n, i64 pitch,
                      i64 splits, i64 add) {
  wait_for_previous_kernel();
  const i64 count = m * n;
  const i64 step = static_cast<i64>(gridDim.x) * SUM_THREADS;
  for (i64 i = static_cast<i64>(blockIdx.x) * SUM_THREADS + threadIdx.x; i < count; i += step) {
    float sum = parts[i];
    for (i64 split = 1; split < splits; ++split) sum += parts[split * count + i];
    const i64 row = i / n, column = i - row * n;
    if (bias != nullptr) sum += bias[column];
    float* const target = out + row * pitch + column;
    *target = add ? *target + sum : sum;
  }
}
