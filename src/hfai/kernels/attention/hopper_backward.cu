// What backward.cu computes, by warpgroups' products on Hopper: for half precision, and for fp32 as
// scaled.cuh has it.
//
// A block takes one head of one batch: all of k, v, q and dout go to shared memory, the first tile of
// rows with k and v before the others. A warpgroup owns 64 keys, whose dk and dv stay in registers,
// and goes through the rows in tiles of 64. Everything is transposed, keys times rows, so that P^T and
// dS^T come out of one product where the next takes its left operand:
//   S^T = k q^T, dP^T = v dout^T, P^T = 2^(S^T - lse), dv += P^T dout,
//   dS^T = P^T (dP^T - delta), dk += dS^T q.
// dS^T goes to shared memory too, for all rows, so that no warpgroup waits for another until all is
// done; then each has rows of dq = dS k. Where there is no room, OVERLAID, the last tile's dS^T lies
// over the first tiles of q and dout, for which warpgroups wait once.
//
// delta is the sum of dout * out over a row; out waits for that where the second half of dS^T will lie.
// Memory is laid out as in backward.cu. Every sum has one owner and one order: the same bits every
// time.
//
// fp32 comes through registers, each tensor behind its largest element. dS has rows as large as dout's:
// so that small ones keep their bits in fp16, they are divided by the row's share, dout's largest in
// the row over the largest of all, and the rows of q multiplied by it, which leaves dk's sum as it was.
// `row_scale` holds, for each row, what takes dP to dS's units; scores and dq are brought back by it.

constexpr int THREADS = 128 * GROUPS;
constexpr int KEYS = GROUPS * TILE_ROWS;
constexpr int ROWS = ROW_TILES * TILE_ROWS;
constexpr int TILES = PASS_ROWS / 8;
constexpr int PASSES = TILE_ROWS / PASS_ROWS;  // of a tile of rows
constexpr int PIECES = TILE_ROWS * 8;       // of 16 bytes, of a tile of rows
constexpr int ROWS_BYTES = 2 * TILE_BYTES;  // of a tile of q and one of dout
// Where one warpgroup has all keys, delta comes from P and dP themselves, and out is not read.
constexpr bool READS_OUT = GROUPS > 1;
static_assert(READS_OUT || SCALED, "of half precision, so few keys are backward.cu's");
static_assert(TILE_ROWS % PASS_ROWS == 0 && PASS_ROWS % 16 == 0, "whole passes");
// Of dS^T in shared memory; `out` lies in those that nothing is written to before all rows are there.
constexpr int DSCORE_TILES = ROW_TILES - (OVERLAID ? 1 : 0);
constexpr int OUT_TILE = ROW_TILES > 1 ? 1 : 0;
static_assert(SCALED || (DSCORE_TILES - OUT_TILE) * GROUPS >= ROW_TILES, "room for out");
static_assert(!OVERLAID || GROUPS <= 2 * (ROW_TILES - 1), "tiles enough to lie over");

// k, v, tiles of q and dout in turns, dS^T, lse, delta, row_scale
extern __shared__ __align__(1024) float shared[];

// As Masks::apply, where the sums' rows are keys and their columns rows; `key_added` is the key mask's
// part of this thread's two keys, `factor` what a column's products are multiplied by.
template <class Factor>
__device__ __forceinline__ void apply_transposed(const Masks& masks, float (&score)[TILES][4],
                                                 int key, int row, const float (&key_added)[2],
                                                 Factor factor) {
  if constexpr (HAS_ADDITION || CAUSAL || RAGGED) {
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = row + t * 8 + i % 2, k = key + i / 2 * 8;
        if constexpr (HAS_ADDITION) {
          float added = 0.0f;
          if constexpr (MASK != NO_MASK)
            if (r < masks.rows && k < masks.keys)
              added = to_base_2(addition<MASK>(masks.mask, r * masks.mask_row + k));
          if constexpr (KEY_MASK != NO_MASK) added += key_added[i / 2];
          score[t][i] = __fmaf_rn(score[t][i], factor(t, i % 2), added);
        }
        if ((RAGGED && KEY_MASK == NO_MASK && k >= masks.keys) || (CAUSAL && k > r))
          score[t][i] = -INFINITE;
      }
  }
}

// delta of a tile's rows: eight threads a row, each of which has the 16 bytes that it copied itself.
__device__ __forceinline__ void sum_products(float* delta, const char* out, const char* dout) {
#pragma unroll
  for (int i = 0; i < ceil_div(PIECES, THREADS); ++i) {
    const int index = i * THREADS + threadIdx.x;
    if (PIECES % THREADS != 0 && index >= PIECES) break;  // whole warps
    const int from = swizzled(index / 8, index % 8);
    const Vector<T, VECTOR> a = *reinterpret_cast<const Vector<T, VECTOR>*>(out + from);
    const Vector<T, VECTOR> b = *reinterpret_cast<const Vector<T, VECTOR>*>(dout + from);
    float sum = 0.0f;
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) sum = __fmaf_rn(a[e], b[e], sum);
#pragma unroll
    for (int offset = 4; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (index % 8 == 0) delta[index / 8] = sum;
  }
}

// Sums of P dP over all keys: each warp leaves those of its own in slots [4][PASS_ROWS], and behind the
// barrier, of which there is one a pass for slots in turn, each thread adds up those of two rows.
__device__ __forceinline__ void leave_sums_over_keys(float* slots, const Kept<TILES>& probability,
                                                     const float (&dprobability)[TILES][4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
    float part[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      part[i] = probability.element(t, i) * dprobability[t][i];
      part[i] = __fmaf_rn(probability.element(t, i + 2), dprobability[t][i + 2], part[i]);
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2)
        part[i] += __shfl_xor_sync(0xffffffffu, part[i], offset);
    }
    if (lane < 4)
      *reinterpret_cast<float2*>(slots + warp * PASS_ROWS + t * 8 + lane * 2) =
          make_float2(part[0], part[1]);
  }
  __syncthreads();
}
__device__ __forceinline__ float2 sum_over_keys(const float* slots) {
  float2 sum = *reinterpret_cast<const float2*>(slots);
#pragma unroll
  for (int warp = 1; warp < 4; ++warp) {
    const float2 part = *reinterpret_cast<const float2*>(slots + warp * PASS_ROWS);
    sum.x += part.x, sum.y += part.y;
  }
  return sum;
}

// The warp's part of a tile of dS^T, from a column on, as the left operand by columns of dq reads it.
__device__ __forceinline__ void store_transposed(char* tile, int column,
                                                 const Kept<TILES>& dscore) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
  for (int t = 0; t < TILES; ++t)
#pragma unroll
    for (int h = 0; h < 2; ++h)
      *reinterpret_cast<u32*>(tile + swizzled(warp * 16 + lane / 4 + 8 * h, column / 8 + t) +
                              lane % 4 * 4) =
          dscore.word[t][h];
}

__device__ __forceinline__ void store_scaled(IO* target, i64 stride, int rows,
                                             const float (&factor)[2],  // of both rows of a thread
                                             float (&sum)[COLUMNS / 8][4]) {
#pragma unroll
  for (int t = 0; t < COLUMNS / 8; ++t)
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[t][i] *= factor[i / 2];
  store_result(target, stride, rows, HEAD, sum);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) hfai_attention_backward(
    const IO* q, const IO* k, const IO* v, const IO* out, const IO* dout, const float* lse,
    const void* mask, const void* key_mask, IO* dq, IO* dk, IO* dv, i64 q_batch, i64 q_row, i64 q_head,
    i64 k_batch, i64 k_row, i64 k_head, i64 v_batch, i64 v_row, i64 v_head, i64 out_batch,
    i64 out_row, i64 out_head, i64 dout_batch, i64 dout_row, i64 dout_head, i64 dq_batch,
    i64 dq_row, i64 dq_head, i64 dk_batch, i64 dk_row, i64 dk_head, i64 dv_batch, i64 dv_row,
    i64 dv_head, i64 mask_batch, i64 mask_head, i64 mask_row, i64 key_mask_batch, i64 key_mask_key,
    i64 heads, i64 rows_, i64 keys_, float factor, float scale) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, group = warpgroup_index();
  const int rows = static_cast<int>(rows_), keys = static_cast<int>(keys_);
  const u32 head = blockIdx.x % static_cast<u32>(heads), batch = blockIdx.x / static_cast<u32>(heads);
  q += batch * q_batch + head * q_head;
  k += batch * k_batch + head * k_head;
  v += batch * v_batch + head * v_head;
  out += batch * out_batch + head * out_head;
  dout += batch * dout_batch + head * dout_head;
  lse += static_cast<i64>(blockIdx.x) * rows;
  const i64 pairs_rows = static_cast<i64>(gridDim.x) * rows;

  char* const all_keys = reinterpret_cast<char*>(shared);
  char* const all_values = all_keys + GROUPS * TILE_BYTES;
  char* const all_rows = all_values + GROUPS * TILE_BYTES;
  char* const dscores = all_rows + ROW_TILES * ROWS_BYTES;
  float* const lse_2 = reinterpret_cast<float*>(dscores + DSCORE_TILES * GROUPS * TILE_BYTES);
  float* const delta = lse_2 + ROWS;
  float* const row_scale = delta + (READS_OUT ? ROWS : 2 * 4 * PASS_ROWS);  // where SCALED
  const auto dscores_of = [&](int tile) {
    return OVERLAID && tile + 1 == ROW_TILES ? all_rows : dscores + tile * GROUPS * TILE_BYTES;
  };
  char* const all_out = dscores + OUT_TILE * GROUPS * TILE_BYTES;
  const auto copy_tile = [&](int tile) {
    char* const target = all_rows + tile * ROWS_BYTES;
    const int row = tile * TILE_ROWS;
    copy_swizzled<TILE_ROWS, THREADS>(all_out + tile * TILE_BYTES, out + row * out_row, out_row,
                                      rows - row, threadIdx.x);
    copy_swizzled<TILE_ROWS, THREADS>(target, q + row * q_row, q_row, rows - row, threadIdx.x);
    copy_swizzled<TILE_ROWS, THREADS>(target + TILE_BYTES, dout + row * dout_row, dout_row,
                                      rows - row, threadIdx.x);
  };

  constexpr int OWN_ROWS = ceil_div(ROWS, THREADS);
  float own_lse[OWN_ROWS];
#pragma unroll
  for (int i = 0; i < OWN_ROWS; ++i) {
    const int row = i * THREADS + threadIdx.x;
    own_lse[i] = row < rows ? first_of_sum(lse + row) : INFINITE;  // no probability beyond the last
  }
  float score_factor = factor, dquery_factor = scale, dkey_factor = scale, dvalue_factor = 1.0f;
  float shift = 0.0f, to_dscore = 1.0f;
  if constexpr (SCALED) {
    constexpr int WARPS = THREADS / 32;
    float* const largest = reinterpret_cast<float*>(dscores);  // which nothing is in yet
    HeldRows<KEYS, THREADS> some_keys, some_values;
    HeldRows<ROWS, THREADS> some_dout, some_rows, some_out;
    some_dout.load(dout, dout_row, rows);
    some_keys.load(k, k_row, keys);
    float largest_lse = 0.0f;
#pragma unroll
    for (int i = 0; i < OWN_ROWS; ++i) {
      const float size = fabsf(own_lse[i]);
      largest_lse = fmaxf(largest_lse, size < INFINITE ? size : 0.0f);
    }
    leave_largest<THREADS>(largest, some_dout.largest());
    leave_largest<THREADS>(largest + WARPS, some_keys.largest());
    leave_largest<THREADS>(largest + 2 * WARPS, largest_lse);
    some_values.load(v, v_row, keys);
    __syncthreads();
    const Scale of_dout = scale_for(read_largest<THREADS>(largest));
    const Scale of_keys = scale_for(read_largest<THREADS>(largest + WARPS));
    // All probabilities of a head alike; where numbers are added, the sum's second part is shifted.
    if (SUM_APART || read_largest<THREADS>(largest + 2 * WARPS) < MOST_SHIFTED)
      shift = PROBABILITY_SHIFT;
    some_dout.store<ROWS_BYTES>(all_rows + TILE_BYTES, of_dout.to);
    some_keys.store(all_keys, of_keys.to);
    float row_share[HeldRows<ROWS, THREADS>::COUNT];
    some_dout.shares(row_share, of_dout.to);
    some_rows.load(q, q_row, rows);
    if (READS_OUT) some_out.load(out, out_row, rows);
    leave_largest<THREADS>(largest + 3 * WARPS, some_values.largest());
    some_rows.multiply(row_share);
    leave_largest<THREADS>(largest + 4 * WARPS, some_rows.largest());
    __syncthreads();
    const Scale of_values = scale_for(read_largest<THREADS>(largest + 3 * WARPS));
    const Scale of_rows = scale_for(read_largest<THREADS>(largest + 4 * WARPS));
    some_values.store(all_values, of_values.to);
    some_rows.store<ROWS_BYTES>(all_rows, of_rows.to);
    // Of dP, a product of 64 columns, and delta no more than 2^36 is possible, of dS that fp16 has.
    to_dscore = shift > 0.0f ? 0x1p-36f : 0x1p-22f;
    if (READS_OUT)
      some_out.sum_products<ROWS_BYTES>(delta, row_scale, all_rows + TILE_BYTES, row_share,
                                        of_values.to, to_dscore);
    else
      some_rows.leave_scales(row_scale, row_share, to_dscore);
    const float dscore_back = of_dout.back * of_values.back * 0x1p22f;
    score_factor = score_bounded(factor * of_rows.back * of_keys.back);
    score_factor *= shift > 0.0f ? 0x1p36f : 0x1p22f;  // which row_scale takes back
    dquery_factor = bounded(scale * of_keys.back * dscore_back);
    dkey_factor = bounded(scale * of_rows.back * dscore_back);
    dvalue_factor = of_dout.back * (shift > 0.0f ? 0x1p-14f : 1.0f);
  } else {
    copy_swizzled<KEYS, THREADS>(all_keys, k, k_row, keys, threadIdx.x);
    copy_swizzled<KEYS, THREADS>(all_values, v, v_row, keys, threadIdx.x);
    copy_tile(0);
    copy_async_commit();
#pragma unroll 1
    for (int tile = 1; tile < ROW_TILES; ++tile) copy_tile(tile);
    copy_async_commit();
  }
#pragma unroll
  for (int i = 0; i < OWN_ROWS; ++i)
    if (i * THREADS + threadIdx.x < ROWS)
      lse_2[i * THREADS + threadIdx.x] = own_lse[i] - (SUM_APART ? 0.0f : shift);
  if constexpr (!SCALED) {
    copy_async_wait<1>();
    sum_products(delta, all_out, all_rows + TILE_BYTES);
  }
  const Masks masks = {mask_of(mask, batch * mask_batch + head * mask_head), mask_row, nullptr,
                       rows, keys, score_factor};
  fence_written_operands();
  __syncthreads();

  const HeadAhead ahead(batch, head, static_cast<u32>(heads));
  if (AHEAD_TENSORS > 0) ahead.prefetch<THREADS>(dout, dout_batch, dout_head, dout_row, rows);
  if (AHEAD_TENSORS > 1) ahead.prefetch<THREADS>(k, k_batch, k_head, k_row, keys);
  if (AHEAD_TENSORS > 2) ahead.prefetch<THREADS>(v, v_batch, v_head, v_row, keys);
  if (AHEAD_TENSORS > 3) ahead.prefetch<THREADS>(q, q_batch, q_head, q_row, rows);
  if (AHEAD_TENSORS > 4 && READS_OUT)
    ahead.prefetch<THREADS>(out, out_batch, out_head, out_row, rows);
  const u32 key_operand = describe(all_keys + group * TILE_BYTES);
  const u32 value_operand = describe(all_values + group * TILE_BYTES);
  const u32 rows_operand = describe(all_rows);
  const float unshift = shift > 0.0f ? 0x1p-14f : 1.0f;
  const int own_key = group * TILE_ROWS + warp * 16 + lane / 4;
  float key_added[2] = {};
  if constexpr (KEY_MASK != NO_MASK)
#pragma unroll
    for (int h = 0; h < 2; ++h)
      key_added[h] = key_addition(key_mask_of(key_mask, batch * key_mask_batch), key_mask_key,
                                  own_key + 8 * h, keys);
  float dkey[1][COLUMNS / 8][4], dvalue[1][COLUMNS / 8][4], sum[1][TILES][4];
  Kept<TILES> probability, dscore;
  set_zero(dkey);
  set_zero(dvalue);

#pragma unroll 1
  for (int pass = 0; pass < ROW_TILES * PASSES; ++pass) {
    if (!SCALED && pass == PASSES) {  // the other tiles have come
      copy_async_wait<0>();
#pragma unroll
      for (int later = 1; later < ROW_TILES; ++later)
        sum_products(delta + later * TILE_ROWS, all_out + later * TILE_BYTES,
                     all_rows + later * ROWS_BYTES + TILE_BYTES);
      fence_written_operands();
      __syncthreads();
    }
    const int tile = pass / PASSES;
    if (OVERLAID && pass == (ROW_TILES - 1) * PASSES) __syncthreads();  // the other tiles are done with
    // Rows that come before all of these keys have no part in them where CAUSAL.
    if (CAUSAL && tile < group) continue;
    const int pass_row = pass * PASS_ROWS, first = pass_row + lane % 4 * 2;
    const u32 some_queries = advanced(rows_operand, tile * ROWS_BYTES + pass_row % TILE_ROWS *
                                                                            SWIZZLED_ROW_BYTES);
    const u32 some_dout = advanced(some_queries, TILE_BYTES);
    hold(dkey[0]);
    begin_products();
    start_scores<PASS_ROWS>(sum[0], opaque(key_operand), some_queries);
    end_products();
    wait_products<0>();  // dkey's of the tile before, too
    hold(sum[0]);
    hold(dkey[0]);

    const auto of_rows = [&](const float* numbers, int t) {
      return *reinterpret_cast<const float2*>(numbers + first + t * 8);
    };
    const auto row_factor = [&](int t, int column) {
      if constexpr (!SCALED) return score_factor;
      const float2 two = of_rows(row_scale, t);
      return score_factor * (column == 0 ? two.x : two.y);
    };
    apply_transposed(masks, sum[0], own_key, first, key_added, row_factor);
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      const float2 offset = of_rows(lse_2, t);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sum[0][t][i] = __fmaf_rn(sum[0][t][i], HAS_ADDITION ? 1.0f : row_factor(t, i % 2),
                                 -(i % 2 == 0 ? offset.x : offset.y));
      if constexpr (SUM_APART)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (first + t * 8 + i % 2 < rows)
            sum[0][t][i] -= second_of_sum(lse + first + t * 8 + i % 2, pairs_rows) - shift;
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[0][t][i] = exp2_approximate(sum[0][t][i]);
    }
    probability.take(sum[0]);

    hold(dvalue[0]);
    begin_products();
    start_scores<PASS_ROWS>(sum[0], opaque(value_operand), some_dout);
    end_products();
    start_sums(dvalue[0], probability, some_dout);
    end_products();
    wait_products<1>();
    hold(sum[0]);

    float* const slots = delta + pass % 2 * (4 * PASS_ROWS);
    if constexpr (!READS_OUT) leave_sums_over_keys(slots, probability, sum[0]);
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      const float2 scales = SCALED ? of_rows(row_scale, t) : make_float2(1.0f, 1.0f);
      float2 of_delta;
      if constexpr (READS_OUT) {
        of_delta = of_rows(delta, t);
      } else {
        of_delta = sum_over_keys(slots + lane % 4 * 2 + t * 8);
        of_delta.x *= scales.x * unshift, of_delta.y *= scales.y * unshift;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float own_delta = i % 2 == 0 ? of_delta.x : of_delta.y;
        const float own_scale = SCALED ? i % 2 == 0 ? scales.x : scales.y : 1.0f;
        const float difference = __fmaf_rn(sum[0][t][i], own_scale, -own_delta);
        sum[0][t][i] = probability.element(t, i) * difference;
      }
    }
    dscore.take(sum[0]);
    store_transposed(dscores_of(tile) + group * TILE_BYTES, pass_row % TILE_ROWS, dscore);
    begin_products();
    start_sums(dkey[0], dscore, some_queries);
    end_products();
  }
  wait_products<0>();
  hold(dkey[0]);
  hold(dvalue[0]);
  fence_written_operands();
  __syncthreads();

  float dquery[1][COLUMNS / 8][4];
  const auto start_dq = [&](int tile) {
    const u32 dscore_operand = describe(dscores_of(tile)), all_key_operand = describe(all_keys);
    const int steps = CAUSAL ? min(GROUPS, tile + 1) * (TILE_ROWS / 16) : KEYS / 16;
    set_zero(dquery);
    hold(dquery[0]);
    begin_products();
#pragma unroll 4
    for (int step = 0; step < steps; ++step)
      WarpgroupProduct<T, COLUMNS>::run<true, true, true>(
          dquery[0], advanced(dscore_operand, step * ACROSS_BYTES),
          advanced(all_key_operand, step * ACROSS_BYTES));
    end_products();
  };
  int tile = group;
  if (tile < ROW_TILES) start_dq(tile);
  const int first_key = group * TILE_ROWS + warp * 16;
  store_scaled(dk + batch * dk_batch + head * dk_head + first_key * dk_row, dk_row, keys - first_key,
               {dkey_factor, dkey_factor}, dkey[0]);
  store_scaled(dv + batch * dv_batch + head * dv_head + first_key * dv_row, dv_row, keys - first_key,
               {dvalue_factor, dvalue_factor}, dvalue[0]);
  dq += batch * dq_batch + head * dq_head;
  while (tile < ROW_TILES) {
    wait_products<0>();
    hold(dquery[0]);
    const int row = tile * TILE_ROWS + warp * 16;
    float row_factors[2] = {dquery_factor, dquery_factor};
    if constexpr (SCALED)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        row_factors[h] *= __fdividef(to_dscore, row_scale[row + lane / 4 + 8 * h]);  // the row's share
    store_scaled(dq + row * dq_row, dq_row, rows - row, row_factors, dquery[0]);
    tile += GROUPS;
    if (tile < ROW_TILES) start_dq(tile);
  }
}
