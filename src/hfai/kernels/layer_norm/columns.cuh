// Sums over rows for a tile of columns: dweight = sum of dy * xhat, dbias = sum of dy.
//
// A block reads its tile of 32 * STRIPS vectors of columns down the rows, a warp a row at a time;
// what the warps found is added in a fixed order. A thread takes STRIPS vectors, 32 apart: with
// short vectors that spreads the reading of a row's statistics over more columns. backward.cu uses
// it where rows are few, long_rows.cu where they are long.

constexpr int STRIP = 32 * VECTOR;
constexpr int TILE = STRIPS * STRIP;
constexpr int TILES = ceil_div(ROW_LENGTH, TILE);

template <class Total>
__device__ __forceinline__ void add_warps(int tile, const float (&value)[STRIPS][VECTOR],
                                          Total total_of) {
  constexpr int WARPS = THREADS / 32;
  __shared__ float merge[WARPS][TILE];
  __syncthreads();
#pragma unroll
  for (int strip = 0; strip < STRIPS; ++strip)
#pragma unroll
    for (int e = 0; e < VECTOR; ++e)
      merge[threadIdx.x / 32][strip * STRIP + threadIdx.x % 32 * VECTOR + e] = value[strip][e];
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
  const int first = tile * TILE + lane * VECTOR;
  // Threads beyond the last column read the first one, and what they add up is dropped: with a
  // branch around the loads, those of one row are waited for before the next row's are asked for.
  auto column = [&](int strip) {
    const int at = first + strip * STRIP;
    return ROW_LENGTH % TILE == 0 || at < ROW_LENGTH ? at : 0;
  };

  float dweight[STRIPS][VECTOR] = {}, dbias[STRIPS][VECTOR] = {};
#pragma unroll 4
  for (i64 row = begin + warp; row < end; row += WARPS) {
    Vector<Y, VECTOR> ys[STRIPS];
    Vector<X, VECTOR> xs[STRIPS];
    float row_mean = 0.0f, row_rstd = 0.0f;
    if constexpr (NEED_DWEIGHT) {
      if constexpr (CENTERED) row_mean = mean[row];
      row_rstd = rstd[row];
    }
#pragma unroll
    for (int strip = 0; strip < STRIPS; ++strip) {
      const i64 at = row * ROW_LENGTH + column(strip);
      ys[strip] = load_kept<ALIGNED, Y, VECTOR>(dy + at);
      if constexpr (NEED_DWEIGHT) xs[strip] = load_kept<ALIGNED, X, VECTOR>(x + at);
    }
#pragma unroll
    for (int strip = 0; strip < STRIPS; ++strip)
#pragma unroll
      for (int e = 0; e < VECTOR; ++e) {
        if constexpr (NEED_DWEIGHT)
          dweight[strip][e] = __fmaf_rn(
              ys[strip][e], __fmul_rn(xs[strip][e] - row_mean, row_rstd), dweight[strip][e]);
        if constexpr (NEED_DBIAS) dbias[strip][e] += ys[strip][e];
      }
  }

  if constexpr (NEED_DWEIGHT) add_warps(tile, dweight, dweight_total);
  if constexpr (NEED_DBIAS) add_warps(tile, dbias, dbias_total);
}
