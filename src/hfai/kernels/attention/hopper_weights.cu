// What weights.cu computes, averaged over heads, by warpgroups' products on Hopper: for half precision,
// and for fp32 as scaled.cuh has it.
//
// A block takes 64 rows and KEYS keys of a batch and goes through its heads in order; the next head's
// rows of q and keys come while this one's are multiplied, to shared memory or, fp32, to registers. A
// warpgroup has the average of 64 rows and CHUNK CHUNKS keys in registers.

constexpr int THREADS = 128 * GROUPS;
constexpr int KEYS = CHUNK * CHUNKS * GROUPS;
constexpr int TILES = CHUNK / 8;
constexpr int STAGES = SCALED ? 1 : 2;
constexpr int STAGE_BYTES = TILE_BYTES + KEYS * SWIZZLED_ROW_BYTES;
static_assert(AVERAGED, "of each head: weights.cu");

extern __shared__ __align__(1024) float shared[];  // q and keys of STAGES heads in turn; the key mask, maxima

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    hfai_attention_weights(const IO* q, const IO* k, const float* lse, IO* weights, const void* mask,
                           const void* key_mask, i64 q_batch, i64 q_row, i64 q_head, i64 k_batch,
                           i64 k_row, i64 k_head, i64 mask_batch, i64 mask_head, i64 mask_row,
                           i64 key_mask_batch, i64 key_mask_key, i64 heads_, i64 rows_, i64 keys_,
                           i64 row_parts, i64 key_parts, float factor) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, group = warpgroup_index();
  const int rows = static_cast<int>(rows_), keys = static_cast<int>(keys_);
  const int heads = static_cast<int>(heads_);
  u32 index = blockIdx.x;
  const int first_key = static_cast<int>(index % static_cast<u32>(key_parts)) * KEYS;
  index /= static_cast<u32>(key_parts);
  const int first_row = static_cast<int>(index % static_cast<u32>(row_parts)) * TILE_ROWS;
  const u32 batch = index / static_cast<u32>(row_parts);
  const int first = first_row + warp * 16, row = first + lane / 4;
  const int own_key = first_key + group * CHUNKS * CHUNK;
  q += batch * q_batch + first_row * q_row;
  k += batch * k_batch + first_key * k_row;
  mask = mask_of(mask, batch * mask_batch);
  const u32 batches = gridDim.x / static_cast<u32>(key_parts) / static_cast<u32>(row_parts);
  const i64 pairs_rows = static_cast<i64>(batches) * heads * rows;
  lse += static_cast<i64>(batch) * heads * rows + row;

  char* const stages = reinterpret_cast<char*>(shared);
  float* const key_added = reinterpret_cast<float*>(stages + STAGES * STAGE_BYTES);
  float* const largest = key_added + KEYS;
  HeldRows<TILE_ROWS, THREADS> held_rows;
  HeldRows<KEYS, THREADS> held_keys;
  const auto fetch = [&](int head) {
    if constexpr (SCALED) {
      held_rows.load(q + head * q_head, q_row, rows - first_row);
      held_keys.load(k + head * k_head, k_row, keys - first_key);
      return;
    }
    char* const stage = stages + head % STAGES * STAGE_BYTES;
    copy_swizzled<TILE_ROWS, THREADS>(stage, q + head * q_head, q_row, rows - first_row, threadIdx.x);
    copy_swizzled<KEYS, THREADS>(stage + TILE_BYTES, k + head * k_head, k_row, keys - first_key,
                                 threadIdx.x);
    copy_async_commit();
  };
  fetch(0);
  read_key_mask<KEYS, THREADS>(
      key_added, key_mask_of(key_mask, batch * key_mask_batch + first_key * key_mask_key),
      key_mask_key, keys - first_key);

  float average[CHUNKS][TILES][4], first_part[2], second_part[2];
  set_zero(average);
  const auto read_sums = [&](int head) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float* const own = lse + static_cast<i64>(head) * rows + 8 * h;
      first_part[h] = row + 8 * h < rows ? first_of_sum(own) : INFINITE;
      second_part[h] = row + 8 * h < rows ? second_of_sum(own, pairs_rows) : 0.0f;
    }
  };
  read_sums(0);
#pragma unroll 1
  for (int head = 0; head < heads; ++head) {
    float score_factor = factor;
    if constexpr (SCALED) {
      leave_largest<THREADS>(largest, held_rows.largest());
      leave_largest<THREADS>(largest + THREADS / 32, held_keys.largest());
      __syncthreads();  // and everybody is done with the head before
      const Scale of_rows = scale_for(read_largest<THREADS>(largest));
      const Scale of_keys = scale_for(read_largest<THREADS>(largest + THREADS / 32));
      held_rows.store(stages, of_rows.to);
      held_keys.store(stages + TILE_BYTES, of_keys.to);
      score_factor = score_bounded(factor * of_rows.back * of_keys.back);
    } else {
      copy_async_wait<0>();
    }
    fence_written_operands();
    __syncthreads();  // and everybody is done with the other stage
    if (head + 1 < heads) fetch(head + 1);
    const u32 queries = describe(stages + head % STAGES * STAGE_BYTES);
    const u32 own_keys =
        advanced(queries, TILE_BYTES + group * CHUNKS * CHUNK * SWIZZLED_ROW_BYTES);
    const float sum[2] = {first_part[0], first_part[1]}, rest[2] = {second_part[0], second_part[1]};
    if (head + 1 < heads) read_sums(head + 1);
    // The key mask in shared memory begins with this block's keys.
    const Masks masks = {mask_of(mask, head * mask_head), mask_row, key_added - first_key,
                         rows, keys, score_factor};
    const float to_exponent = masks.exponent_factor();
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      float score[TILES][4];
      begin_products();
      start_scores<CHUNK>(score, queries,
                          advanced(own_keys, chunk * CHUNK * SWIZZLED_ROW_BYTES));
      end_products();
      wait_products<0>();
      hold(score);
      masks.apply(score, row, own_key + chunk * CHUNK + lane % 4 * 2);
#pragma unroll
      for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          average[chunk][t][i] += exp2_approximate(
              __fmaf_rn(score[t][i], to_exponent, -sum[i / 2]) - rest[i / 2]);
    }
  }
  const float share = __fdividef(1.0f, static_cast<float>(heads));
  weights += static_cast<i64>(batch) * rows * keys + static_cast<i64>(first) * keys + own_key;
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; ++chunk) {
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) average[chunk][t][i] *= share;
    const int before = chunk * CHUNK;
    store_weights(weights + before, rows - first, keys - own_key - before, keys, average[chunk]);
  }
}
