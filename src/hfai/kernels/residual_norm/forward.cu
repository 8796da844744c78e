// z = residual + dropout(branch + branch_bias), y = LayerNorm(z): everything read once and written
// once. z is rounded to its type before its statistics are taken, so that backward, which reads it
// from memory, sees the same numbers.
//
// Outputs that are null are not wanted: z, y, and y_half (y in the branch's type, for the product
// that follows). Statistics and mask are for backward.
//
// plan.py sets: ROW_LENGTH VECTOR LANES THREADS DROPOUT HAS_BRANCH_BIAS HAS_WEIGHT HAS_BIAS
//               B R Z Y W (types of branch, residual, z, y; of weight, bias and branch_bias)

typedef RowSum<1, LANES, THREADS, 1> FirstSum;
typedef RowSum<2, LANES, THREADS, 1> SecondSum;
typedef Vector<W, VECTOR> WVector;

constexpr int FIRST_SUM_FLOATS = ceil_div(static_cast<int>(sizeof(FirstSum::Shared)), 16) * 4;

extern "C" __global__ void __launch_bounds__(THREADS)
    hfai_residual_norm_forward(const B* __restrict__ branch, const W* __restrict__ branch_bias,
                               const R* __restrict__ residual, const W* __restrict__ weight,
                               const W* __restrict__ bias, const i64* __restrict__ seed,
                               Z* __restrict__ z_out, Y* __restrict__ y_out,
                               B* __restrict__ y_half_out, unsigned char* __restrict__ mask_out,
                               float* __restrict__ mean_out, float* __restrict__ rstd_out,
                               i64 keep_below, float scale, float eps, i64 rows) {
  extern __shared__ float shared[];
  FirstSum first_sum(reinterpret_cast<typename FirstSum::Shared*>(shared));
  SecondSum second_sum(reinterpret_cast<typename SecondSum::Shared*>(shared + FIRST_SUM_FLOATS));
  const Place place;
  const i64 row = static_cast<i64>(blockIdx.x) * SLOTS + place.slot;
  const bool in_rows = row < rows;
  const i64 start = (in_rows ? row : rows - 1) * ROW_LENGTH;

  Vector<B, VECTOR> branches[PER_LANE];
  Vector<R, VECTOR> residuals[PER_LANE];
#pragma unroll
  for (int k = 0; k < PER_LANE; ++k) {
    branches[k] = load_kept<true, B, VECTOR>(branch + start + place.column(k));
    residuals[k] = load_kept<true, R, VECTOR>(residual + start + place.column(k));
  }
  u32 mask[PER_LANE];
  if constexpr (DROPOUT) {
    const u64 key = static_cast<u64>(*seed);
#pragma unroll
    for (int k = 0; k < PER_LANE; ++k) {
      mask[k] = draw_mask(key, row, place.column(k), keep_below);
      if (mask_out != nullptr)
        store_mask(mask_out + row * MASK_BYTES, mask[k], place.column(k),
                   in_rows && place.holds(k));
    }
  }

  float z[PER_LANE][VECTOR], part[PER_LANE];
#pragma unroll
  for (int k = 0; k < PER_LANE; ++k) {
    WVector shift;
    if constexpr (HAS_BRANCH_BIAS)
      shift = load_kept<true, W, VECTOR>(branch_bias + place.column(k));
    part[k] = 0.0f;
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) {
      float value = branches[k][e];
      if constexpr (HAS_BRANCH_BIAS) value += shift[e];
      if constexpr (DROPOUT) value = mask[k] >> e & 1 ? value * scale : 0.0f;
      z[k][e] = to_float(from_float<Z>(residuals[k][e] + value));
      part[k] += z[k][e];
    }
    if (!place.holds(k)) part[k] = 0.0f;
  }
  float mean[1] = {neighbour_sum<PER_LANE>(part)};
  first_sum(mean);
  mean[0] *= INVERSE_LENGTH;

  // Squares of what is left, and the rest that the mean's rounding left over (as in layer_norm/).
  float second[2] = {0.0f, 0.0f};
#pragma unroll
  for (int k = 0; k < PER_LANE; ++k)
    if (place.holds(k))
#pragma unroll
      for (int e = 0; e < VECTOR; ++e) {
        const float centered = z[k][e] - mean[0];
        second[0] = __fmaf_rn(centered, centered, second[0]);
        second[1] += centered;
      }
  second_sum(second);
  const float left_over = second[1] * INVERSE_LENGTH;
  float variance = __fmaf_rn(-left_over, left_over, second[0] * INVERSE_LENGTH);
  variance = variance < 0.0f ? 0.0f : variance;  // and NaN stays NaN
  mean[0] += left_over;
  const float rstd = rsqrtf(variance + eps);

  if (!in_rows) return;
  if (rstd_out != nullptr && place.lane == 0) {
    mean_out[row] = mean[0];
    rstd_out[row] = rstd;
  }
#pragma unroll
  for (int k = 0; k < PER_LANE; ++k) {
    if (!place.holds(k)) continue;
    const int column = place.column(k);
    if (z_out != nullptr) store_kept<true, Z, VECTOR>(z_out + start + column, z[k]);
    WVector w, b;
    if constexpr (HAS_WEIGHT) w = load_kept<true, W, VECTOR>(weight + column);
    if constexpr (HAS_BIAS) b = load_kept<true, W, VECTOR>(bias + column);
    float y[VECTOR];
#pragma unroll
    for (int e = 0; e < VECTOR; ++e)
      y[e] = to_float(from_float<Y>(
          scale_and_shift<HAS_WEIGHT, HAS_BIAS>((z[k][e] - mean[0]) * rstd, w, b, e)));
    if (y_out != nullptr) store_kept<true, Y, VECTOR>(y_out + start + column, y);
    if (y_half_out != nullptr) store_kept<true, B, VECTOR>(y_half_out + start + column, y);
  }
}
