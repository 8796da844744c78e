// LayerNorm and RMSNorm backward in one reading of x and dy.
//
// With xhat = (x - mean) * rstd and g = dy * weight:
//   dx      = rstd * (g - sum(g)/N - xhat * sum(g * xhat)/N)     sums over the row, N its length
//   dweight = sum over rows of dy * xhat,   dbias = sum over rows of dy
// (RMSNorm: mean = 0 and the first sum is left out.)
//
// The grid is persistent: each group of THREADS (times CLUSTER) threads walks over many rows and a
// thread keeps the dweight and dbias of its own columns in registers, so that no atomics are needed
// and the order of the sums is fixed by the grid. A second small kernel adds the groups' partial
// sums (column_sums.cu). Rows ahead are copied into shared memory asynchronously, STAGES deep; each thread copies
// just what it will read itself, so the copies need no barrier.
//
// FEW_ROWS: dweight_out and dbias_out are the gradients themselves. A block takes its rows for dx
// alone, and blocks beyond those sum tiles of columns, so that a small call is one launch.
//
// Products and sums are fused by hand and not as the compiler sees fit: it sees fit differently in
// different variants, and the bits of dx must not depend on the variant.
//
// plan.py sets: ROW_LENGTH VECTOR LANES THREADS CLUSTER ROWS STAGES ALIGNED CENTERED
//               HAS_WEIGHT NEED_DX NEED_DWEIGHT NEED_DBIAS FEW_ROWS  X Y W (types of x and dx, dy, weight)
// STAGES = 0 loads straight into registers: for what cp.async cannot copy (odd rows of 2-byte types,
// misaligned tensors).

constexpr int VECTORS = ROW_LENGTH / VECTOR;
constexpr int STRIDE = LANES * CLUSTER;
constexpr int PER_LANE = ceil_div(VECTORS, STRIDE);
constexpr int SLOTS = THREADS / LANES;
constexpr int COLUMNS = PER_LANE * VECTOR;  // of one thread
constexpr bool ASYNC = STAGES > 0;
constexpr bool SUM_DWEIGHT = NEED_DWEIGHT && !FEW_ROWS;
constexpr bool SUM_DBIAS = NEED_DBIAS && !FEW_ROWS;

typedef Vector<X, VECTOR> XVector;
typedef Vector<Y, VECTOR> YVector;
typedef Vector<W, VECTOR> WVector;

// Weights stay in registers while they are few, else in shared memory, each thread's own.
constexpr bool WEIGHT_IN_REGISTERS = PER_LANE * WVector::BYTES <= 64;
// xhat and g stay in registers between the two passes while they are few, else are made again.
constexpr bool KEEP = ROWS * COLUMNS <= 16;

// The dynamic shared memory, in bytes; plan.py computes the same sum.
constexpr int X_STAGE = ROWS * PER_LANE * THREADS * XVector::BYTES;
constexpr int Y_STAGE = ROWS * PER_LANE * THREADS * YVector::BYTES;
constexpr int WEIGHT_OFFSET = STAGES * (X_STAGE + Y_STAGE);

constexpr int SUMS = CENTERED ? 2 * ROWS : ROWS;
typedef RowSum<SUMS, LANES, THREADS, CLUSTER> Sum;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hfai_layer_norm_backward(const Y* __restrict__ dy, const X* __restrict__ x,
                             const W* __restrict__ weight, const float* __restrict__ mean,
                             const float* __restrict__ rstd, X* __restrict__ dx,
                             void* __restrict__ dweight_out, void* __restrict__ dbias_out,
                             i64 rows) {
  extern __shared__ __align__(16) char ring[];
  __shared__ typename Sum::Shared shared;
  const int group = blockIdx.x / CLUSTER;
  i64 groups = gridDim.x / CLUSTER;
  if constexpr (FEW_ROWS) {
    groups = NEED_DX ? (rows + SLOTS * ROWS - 1) / (SLOTS * ROWS) : 0;
    if (group >= groups) {
      const int tile = blockIdx.x - static_cast<int>(groups) * CLUSTER;
      W* __restrict__ dweight = static_cast<W*>(dweight_out);
      W* __restrict__ dbias = static_cast<W*>(dbias_out);
      if (tile < TILES)
        sum_columns(
            tile, 0, rows, dy, x, mean, rstd,
            [&](int column, float total) { dweight[column] = from_float<W>(total); },
            [&](int column, float total) { dbias[column] = from_float<W>(total); });
      return;
    }
  }
  Sum sum(&shared);
  let_next_kernel_start();
  const int lane = threadIdx.x % LANES;
  const int slot = threadIdx.x / LANES;
  const int first_vector = (CLUSTER > 1 ? cluster_rank() * LANES : 0) + lane;
  const i64 step = groups * (SLOTS * ROWS);

  auto holds = [&](int k) {
    return (k + 1) * STRIDE <= VECTORS || first_vector + k * STRIDE < VECTORS;
  };
  auto column = [&](int k) { return (first_vector + k * STRIDE) * VECTOR; };
  auto x_stage = [&](int stage) { return ring + stage * (X_STAGE + Y_STAGE); };
  auto y_stage = [&](int stage) { return ring + stage * (X_STAGE + Y_STAGE) + X_STAGE; };

  auto prefetch = [&](int stage, i64 base) {
    if constexpr (ASYNC) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const i64 row = base + r * SLOTS + slot;
        if (row < rows)
#pragma unroll
          for (int k = 0; k < PER_LANE; ++k)
            if (holds(k)) {
              const i64 offset = row * ROW_LENGTH + column(k);
              copy_vector_async<XVector, THREADS>(x_stage(stage), r * PER_LANE + k, x + offset);
              copy_vector_async<YVector, THREADS>(y_stage(stage), r * PER_LANE + k, dy + offset);
            }
      }
      copy_async_commit();
    }
  };

  float dweight[COLUMNS], dbias[COLUMNS];
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) dweight[c] = dbias[c] = 0.0f;

  WVector weights[HAS_WEIGHT && WEIGHT_IN_REGISTERS ? PER_LANE : 1];
  if constexpr (HAS_WEIGHT && NEED_DX)
#pragma unroll
    for (int k = 0; k < PER_LANE; ++k) {
      const WVector w = holds(k) ? load_kept<ALIGNED, W, VECTOR>(weight + column(k)) : WVector{};
      if constexpr (WEIGHT_IN_REGISTERS)
        weights[k] = w;
      else
        write_vector<WVector, THREADS>(ring + WEIGHT_OFFSET, k, w);
    }
  auto weight_vector = [&](int k) {
    if constexpr (WEIGHT_IN_REGISTERS)
      return weights[k];
    else
      return read_vector<WVector, THREADS>(ring + WEIGHT_OFFSET, k);
  };

  float next_mean[ROWS], next_rstd[ROWS];
  auto prefetch_statistics = [&](i64 base) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const i64 row = base + r * SLOTS + slot;
      next_mean[r] = CENTERED && row < rows ? __ldg(mean + row) : 0.0f;
      next_rstd[r] = row < rows ? __ldg(rstd + row) : 0.0f;
    }
  };

  const i64 start = static_cast<i64>(group) * (SLOTS * ROWS);
#pragma unroll
  for (int s = 0; s < STAGES; ++s) prefetch(s, start + s * step);
  prefetch_statistics(start);

  int stage = 0;
  for (i64 base = start; base < rows; base += step) {
    float row_mean[ROWS], row_rstd[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) row_mean[r] = next_mean[r], row_rstd[r] = next_rstd[r];
    prefetch_statistics(base + step);

    XVector x_loaded[ASYNC ? 1 : ROWS * PER_LANE];
    YVector y_loaded[ASYNC ? 1 : ROWS * PER_LANE];
    if constexpr (ASYNC) {
      copy_async_wait<(STAGES > 0 ? STAGES - 1 : 0)>();
    } else {
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int k = 0; k < PER_LANE; ++k) {
          const i64 row = base + r * SLOTS + slot;
          if (row < rows && holds(k)) {
            const i64 offset = row * ROW_LENGTH + column(k);
            x_loaded[r * PER_LANE + k] = load_once<ALIGNED, X, VECTOR>(x + offset);
            y_loaded[r * PER_LANE + k] = load_once<ALIGNED, Y, VECTOR>(dy + offset);
          }
        }
    }
    auto x_vector = [&](int r, int k) {
      if constexpr (ASYNC)
        return read_vector<XVector, THREADS>(x_stage(stage), r * PER_LANE + k);
      else
        return x_loaded[r * PER_LANE + k];
    };
    auto y_vector = [&](int r, int k) {
      if constexpr (ASYNC)
        return read_vector<YVector, THREADS>(y_stage(stage), r * PER_LANE + k);
      else
        return y_loaded[r * PER_LANE + k];
    };

    // First pass: the row's two sums, and this row's share of dweight and dbias.
    float sums[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; ++i) sums[i] = 0.0f;
    float kept_xhat[KEEP ? ROWS : 1][KEEP ? COLUMNS : 1];
    float kept_g[KEEP ? ROWS : 1][KEEP ? COLUMNS : 1];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if (base + r * SLOTS + slot >= rows) continue;
#pragma unroll
      for (int k = 0; k < PER_LANE; ++k) {
        if (!holds(k)) continue;
        const XVector xs = x_vector(r, k);
        const YVector ys = y_vector(r, k);
        WVector w;
        if constexpr (HAS_WEIGHT && NEED_DX) w = weight_vector(k);
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
          const float xhat = __fmul_rn(xs[e] - row_mean[r], row_rstd[r]);
          const float gradient = ys[e];
          float& dweight_sum = dweight[k * VECTOR + e];
          if constexpr (SUM_DWEIGHT) dweight_sum = __fmaf_rn(gradient, xhat, dweight_sum);
          if constexpr (SUM_DBIAS) dbias[k * VECTOR + e] += gradient;
          if constexpr (NEED_DX) {
            const float g = HAS_WEIGHT ? __fmul_rn(gradient, w[e]) : gradient;
            sums[r] = __fmaf_rn(g, xhat, sums[r]);
            if constexpr (CENTERED) sums[ROWS + r] += g;
            if constexpr (KEEP) kept_xhat[r][k * VECTOR + e] = xhat, kept_g[r][k * VECTOR + e] = g;
          }
        }
      }
    }

    // Second pass: dx.
    if constexpr (NEED_DX) {
      sum(sums);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const i64 row = base + r * SLOTS + slot;
        if (row >= rows) continue;
        const float along_xhat = __fmul_rn(sums[r], 1.0f / ROW_LENGTH);
        const float along_one = CENTERED ? __fmul_rn(sums[SUMS - ROWS + r], 1.0f / ROW_LENGTH) : 0.0f;
        auto dx_element = [&](float xhat, float g) {
          return __fmul_rn(row_rstd[r], __fmaf_rn(-xhat, along_xhat, g - along_one));
        };
#pragma unroll
        for (int k = 0; k < PER_LANE; ++k) {
          if (!holds(k)) continue;
          float out[VECTOR];
          if constexpr (KEEP) {
#pragma unroll
            for (int e = 0; e < VECTOR; ++e)
              out[e] = dx_element(kept_xhat[r][k * VECTOR + e], kept_g[r][k * VECTOR + e]);
          } else {
            const XVector xs = x_vector(r, k);
            const YVector ys = y_vector(r, k);
            WVector w;
            if constexpr (HAS_WEIGHT) w = weight_vector(k);
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) {
              const float xhat = __fmul_rn(xs[e] - row_mean[r], row_rstd[r]);
              out[e] = dx_element(xhat, HAS_WEIGHT ? __fmul_rn(ys[e], w[e]) : ys[e]);
            }
          }
          store_once<ALIGNED, X, VECTOR>(dx + row * ROW_LENGTH + column(k), out);
        }
      }
    }
    // This thread has used what it read from the stage: it may be filled again.
    prefetch(stage, base + STAGES * step);
    if constexpr (ASYNC) stage = stage + 1 == STAGES ? 0 : stage + 1;
  }

  if constexpr (CLUSTER > 1) cluster_barrier();  // no block ends while another may write to it

  // The group's sums over its slots, in pairs: fewer roundings in a row than one slot after the
  // other, and fewer steps.
  float* merge = reinterpret_cast<float*>(ring);
  if constexpr (SLOTS > 1) {
    if constexpr (ASYNC) copy_async_wait<0>();
    __syncthreads();
  }
  auto write_sums = [&](const float(&value)[COLUMNS], float* __restrict__ target, int stride) {
    typedef Vector<float, VECTOR> Sums;
    typedef typename PieceType<Sums::PIECE>::type Piece;
#pragma unroll
    for (int k = 0; k < PER_LANE; ++k) {
      if (!holds(k)) continue;
      Sums sums;
#pragma unroll
      for (int e = 0; e < VECTOR; ++e) sums.element[e] = value[k * VECTOR + e];
#pragma unroll
      for (int p = 0; p < Sums::PIECES; ++p)
        reinterpret_cast<Piece*>(target + stride * slot + column(k))[p] =
            reinterpret_cast<const Piece*>(&sums)[p];
    }
  };
  float* __restrict__ partials[2] = {
      static_cast<float*>(dweight_out) + static_cast<i64>(group) * ROW_LENGTH,
      static_cast<float*>(dbias_out) + static_cast<i64>(group) * ROW_LENGTH};
  if constexpr (SLOTS == 1) {
    if constexpr (SUM_DWEIGHT) write_sums(dweight, partials[0], 0);
    if constexpr (SUM_DBIAS) write_sums(dbias, partials[1], 0);
  } else if constexpr (SUM_DWEIGHT || SUM_DBIAS) {
    constexpr int WIDTH = 2 * ROW_LENGTH;  // dweight beside dbias
    if constexpr (SUM_DWEIGHT) write_sums(dweight, merge, WIDTH);
    if constexpr (SUM_DBIAS) write_sums(dbias, merge + ROW_LENGTH, WIDTH);
    __syncthreads();
    for (int slots = SLOTS; slots > 1; slots = (slots + 1) / 2) {
      const int kept = (slots + 1) / 2 * WIDTH;
      for (int i = threadIdx.x; i < slots * WIDTH - kept; i += THREADS) merge[i] += merge[kept + i];
      __syncthreads();
    }
    for (int c = threadIdx.x; c < ROW_LENGTH; c += THREADS) {
      if constexpr (SUM_DWEIGHT) partials[0][c] = merge[c];
      if constexpr (SUM_DBIAS) partials[1][c] = merge[ROW_LENGTH + c];
    }
  }
}
