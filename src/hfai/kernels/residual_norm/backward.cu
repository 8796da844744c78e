// The gradients of forward.cu in one reading of z and of what came back:
//
//   dy_all    = dy + dy_half                                       either may be null, and dz
//   xhat      = (z - mean) * rstd,  g = dy_all * weight
//   dresidual = dz + rstd * (g - sum(g)/N - xhat * sum(g * xhat)/N)      sums over the row of N
//   dbranch   = dresidual * scale where the mask keeps, else 0
//   dweight   = sum over rows of dy_all * xhat, dbias of dy_all, dbranch_bias of dbranch
//
// The grid is persistent: a block walks over many rows, and its threads keep the sums over rows of
// their own columns in registers. hfai_residual_norm_add_partials then adds the blocks' sums. So
// there are no atomics, and the order of the sums is fixed by the grid.
//
// plan.py sets: ROW_LENGTH VECTOR LANES THREADS BLOCKS DROPOUT HAS_WEIGHT NEED_AFFINE
//               NEED_BRANCH_BIAS  B R Z Y W

typedef RowSum<2, LANES, THREADS, 1> Sum;
typedef Vector<W, VECTOR> WVector;

// The dynamic shared memory holds the sums over a row, then, at the end, one sum of each slot.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    hfai_residual_norm_backward(const Y* __restrict__ dy, const B* __restrict__ dy_half,
                                const Z* __restrict__ dz, const Z* __restrict__ z,
                                const W* __restrict__ weight,
                                const unsigned char* __restrict__ mask,
                                const float* __restrict__ mean, const float* __restrict__ rstd,
                                R* __restrict__ dresidual, B* __restrict__ dbranch,
                                float* __restrict__ partials, float scale, i64 rows) {
  extern __shared__ float shared[];
  Sum sum(reinterpret_cast<typename Sum::Shared*>(shared));
  let_next_kernel_start();
  const Place place;

  WVector weights[HAS_WEIGHT ? PER_LANE : 1];
  if constexpr (HAS_WEIGHT)
#pragma unroll
    for (int k = 0; k < PER_LANE; ++k)
      weights[k] = load_kept<true, W, VECTOR>(weight + place.column(k));

  float dweight[COLUMNS], dbias[COLUMNS], dbranch_bias[COLUMNS];
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) dweight[c] = dbias[c] = dbranch_bias[c] = 0.0f;

  const i64 step = static_cast<i64>(gridDim.x) * SLOTS;
  // All slots take as many turns, so that they meet at the barriers; those beyond the last row read
  // it again, and neither write nor add.
  const i64 turns = (rows + step - 1) / step;
  for (i64 turn = 0; turn < turns; ++turn) {
    const i64 wanted = turn * step + static_cast<i64>(blockIdx.x) * SLOTS + place.slot;
    const bool in_rows = wanted < rows;
    const i64 row = in_rows ? wanted : rows - 1;
    const i64 start = row * ROW_LENGTH;

    Vector<Z, VECTOR> zs[PER_LANE];
    float dy_all[PER_LANE][VECTOR];
    u32 kept[PER_LANE];
#pragma unroll
    for (int k = 0; k < PER_LANE; ++k) {
      const int column = place.column(k);
      zs[k] = load_kept<true, Z, VECTOR>(z + start + column);
      if constexpr (DROPOUT) kept[k] = load_mask(mask + row * MASK_BYTES, column);
      Vector<Y, VECTOR> whole = {};
      Vector<B, VECTOR> half = {};
      if (dy != nullptr) whole = load_kept<true, Y, VECTOR>(dy + start + column);
      if (dy_half != nullptr) half = load_kept<true, B, VECTOR>(dy_half + start + column);
#pragma unroll
      for (int e = 0; e < VECTOR; ++e)
        dy_all[k][e] = in_rows && place.holds(k) ? whole[e] + half[e] : 0.0f;
    }
    const float row_mean = __ldg(mean + row), row_rstd = __ldg(rstd + row);

    float sums[2] = {0.0f, 0.0f};
#pragma unroll
    for (int k = 0; k < PER_LANE; ++k)
#pragma unroll
      for (int e = 0; e < VECTOR; ++e) {
        const float xhat = (zs[k][e] - row_mean) * row_rstd;
        const float gradient = dy_all[k][e];
        const float g = HAS_WEIGHT ? gradient * weights[k][e] : gradient;
        sums[0] = __fmaf_rn(g, xhat, sums[0]);
        sums[1] += g;
        if constexpr (NEED_AFFINE) {
          float& dweight_sum = dweight[k * VECTOR + e];
          // A product with 0 of what stands in for a missing column may be NaN.
          if (in_rows && place.holds(k)) dweight_sum = __fmaf_rn(gradient, xhat, dweight_sum);
          dbias[k * VECTOR + e] += gradient;
        }
      }
    sum(sums);
    const float along_xhat = sums[0] * INVERSE_LENGTH, along_one = sums[1] * INVERSE_LENGTH;

#pragma unroll
    for (int k = 0; k < PER_LANE; ++k) {
      if (!in_rows || !place.holds(k)) continue;
      const int column = place.column(k);
      Vector<Z, VECTOR> before = {};
      if (dz != nullptr) before = load_kept<true, Z, VECTOR>(dz + start + column);
      float whole[VECTOR], dropped[VECTOR];
#pragma unroll
      for (int e = 0; e < VECTOR; ++e) {
        const float xhat = (zs[k][e] - row_mean) * row_rstd;
        const float g = HAS_WEIGHT ? dy_all[k][e] * weights[k][e] : dy_all[k][e];
        whole[e] = before[e] + row_rstd * __fmaf_rn(-xhat, along_xhat, g - along_one);
        dropped[e] = whole[e];
        if constexpr (DROPOUT) dropped[e] = kept[k] >> e & 1 ? whole[e] * scale : 0.0f;
        if constexpr (NEED_BRANCH_BIAS) dbranch_bias[k * VECTOR + e] += dropped[e];
      }
      if (dresidual != nullptr) store_kept<true, R, VECTOR>(dresidual + start + column, whole);
      if (dbranch != nullptr) store_kept<true, B, VECTOR>(dbranch + start + column, dropped);
    }
  }

  // The block's sums, over its slots in order: [dweight, dbias, dbranch_bias][block][column].
  float* __restrict__ target = partials + static_cast<i64>(blockIdx.x) * ROW_LENGTH;
  auto write_sums = [&](const float(&value)[COLUMNS]) {
    __syncthreads();
#pragma unroll
    for (int k = 0; k < PER_LANE; ++k)
      if (place.holds(k))
#pragma unroll
        for (int e = 0; e < VECTOR; ++e)
          shared[place.slot * ROW_LENGTH + place.column(k) + e] = value[k * VECTOR + e];
    __syncthreads();
    for (int c = threadIdx.x; c < ROW_LENGTH; c += THREADS) {
      float total = shared[c];
#pragma unroll
      for (int slot = 1; slot < SLOTS; ++slot) total += shared[slot * ROW_LENGTH + c];
      target[c] = total;
    }
    target += static_cast<i64>(gridDim.x) * ROW_LENGTH;
  };
  if constexpr (NEED_AFFINE) write_sums(dweight), write_sums(dbias);
  if constexpr (NEED_BRANCH_BIAS) write_sums(dbranch_bias);
}

constexpr int SUM_THREADS = 1024;

// Adds the sums of all blocks, in a fixed order; a block of the grid takes 32 columns of one of the
// outputs, which lie in `partials` in the order of the pointers that are not null.
extern "C" __global__ void __launch_bounds__(SUM_THREADS)
    hfai_residual_norm_add_partials(const float* __restrict__ partials, W* __restrict__ first,
                                    W* __restrict__ second, W* __restrict__ third, i64 groups) {
  extern __shared__ float shared[];
  wait_for_previous_kernel();
  constexpr int TILES = ceil_div(ROW_LENGTH, 32);
  const int which = blockIdx.x / TILES, lane = threadIdx.x % 32, part = threadIdx.x / 32;
  const int column = blockIdx.x % TILES * 32 + lane;
  const float* __restrict__ source = partials + which * groups * ROW_LENGTH + column;
  float total = 0.0f;
  // Not through the read-only cache: the kernel in front may have written after this one started.
  if (column < ROW_LENGTH)
#pragma unroll 4
    for (i64 group = part; group < groups; group += SUM_THREADS / 32)
      total += __ldcg(source + group * ROW_LENGTH);
  shared[part * 33 + lane] = total;
  __syncthreads();
#pragma unroll
  for (int half = SUM_THREADS / 64; half > 0; half /= 2) {
    if (part < half) shared[part * 33 + lane] += shared[(part + half) * 33 + lane];
    __syncthreads();
  }
  W* __restrict__ target = which == 0 ? first : which == 1 ? second : third;
  if (part == 0 && column < ROW_LENGTH) target[column] = from_float<W>(shared[lane]);
}
