// Sums over rows for a tile of columns: dweight = sum of dy * xhat, dbias = sum of dy.
//
// A block reads its tile of 32 vectors of columns down the rows, a warp a row at a time; what the
// warps found is added in a fixed order. backward.cu uses it where rows are few, long_rows.cu where
// they are long.

constexpr int TILE = 32 * VECTOR;
constexpr int TILES = ceil_div(ROW_LENGTH, TILE);

template <class Total>
__device__ __forceinline__ void add_warps(int tile, const float (&value)[VECTOR], Total total_of) {
  constexpr int WARPS = THREADS / 32;
  __shared__ float merge[WARPS][TILE];
  __syncthreads();
#pragma unroll
  for (int e = 0; e < VECTOR; ++e)
    merge[threadIdx.x / 32][threadIdx.x % 32 * VECTOR + e] = value[e];
  __syncthreads();
  for (int c = threadIdx.x; c < TILE; c += THREADS) {
    float total = merge[0][c];
#pragma unroll
    for (int other = 1; other < WARPS; ++other) total += merge[other][c];
    if (tile * TILE + c < ROW_LENGTH) total_of(tile * TILE + c, total);
  }
}

// Adds rows [begin, end) and passes each total to `dweight_total(column, total)` and
// `dbias_total(column, total)`, called by one thread a column.
template <class DWeightTotal, class DBiasTotal>
__device__ __forceinline__ void sum_columns(int tile, i64 begin, i64 end,
                                            const Y* __restrict__ dy, const X* __restrict__ x,
                                            const float* __restrict__ mean,
                                            const float* __restrict__ rstd,
                                            DWeightTotal dweight_total, DBiasTotal dbias_total) {
  constexpr int WARPS = THREADS / 32;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int column = tile * TILE + lane * VECTOR;

  float dweight[VECTOR] = {}, dbias[VECTOR] = {};
  if (column < ROW_LENGTH)
#pragma unroll 4
    for (i64 row = begin + warp; row < end; row += WARPS) {
      const auto ys = load_kept<ALIGNED, Y, VECTOR>(dy + row * ROW_LENGTH + column);
      Vector<X, VECTOR> xs;
      float row_mean = 0.0f, row_rstd = 0.0f;
      if constexpr (NEED_DWEIGHT) {
        xs = load_kept<ALIGNED, X, VECTOR>(x + row * ROW_LENGTH + column);
        if constexpr (CENTERED) row_mean = mean[row];
        row_rstd = rstd[row];
      }
#pragma unroll
      for (int e = 0; e < VECTOR; ++e) {
        if constexpr (NEED_DWEIGHT)
          dweight[e] = __fmaf_rn(ys[e], __fmul_rn(xs[e] - row_mean, row_rstd), dweight[e]);
        if constexpr (NEED_DBIAS) dbias[e] += ys[e];
      }
    }

  if constexpr (NEED_DWEIGHT) add_warps(tile, dweight, dweight_total);
  if constexpr (NEED_DBIAS) add_warps(tile, dbias, dbias_total);
}
