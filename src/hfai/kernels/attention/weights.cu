// The attention weights themselves, from lse: of every head, or averaged over the heads.
//
// A block takes WARPS * 16 rows and CHUNK keys of one batch and loops over the heads, in order, so
// that an average needs neither atomics nor a second pass. The next head's operands arrive while
// this one's are multiplied.
//
// weights are [batch][row][key] where AVERAGED, else [batch][head][row][key], contiguous; ALIGNED
// says that their rows start on 16 bytes. The rest is as in forward.cu.

constexpr int THREADS = 32 * WARPS;
constexpr int TILES = CHUNK / 8;
constexpr int ROWS = 16 * WARPS;
constexpr int OPERANDS = (ROWS + CHUNK) * PITCH;

extern __shared__ float shared[];  // rows of q and keys, of two heads in turn; the key mask

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    hfai_attention_weights(const T* q, const T* k, const float* lse, T* weights, const void* mask,
                           const void* key_mask, i64 q_batch, i64 q_row, i64 q_head, i64 k_batch,
                           i64 k_row, i64 k_head, i64 mask_batch, i64 mask_head, i64 mask_row,
                           i64 key_mask_batch, i64 key_mask_key, i64 heads_, i64 rows_, i64 keys_,
                           i64 row_parts, i64 key_parts, float factor) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int rows = static_cast<int>(rows_), keys = static_cast<int>(keys_);
  const int heads = static_cast<int>(heads_);
  u32 index = blockIdx.x;
  const int first_key = static_cast<int>(index % static_cast<u32>(key_parts)) * CHUNK;
  index /= static_cast<u32>(key_parts);
  const int first_row = static_cast<int>(index % static_cast<u32>(row_parts)) * ROWS;
  const u32 batch = index / static_cast<u32>(row_parts);
  const int first = first_row + warp * 16;
  q += batch * q_batch + first_row * q_row;
  k += batch * k_batch + first_key * k_row;
  mask = mask_of(mask, batch * mask_batch);
  const u32 batches = gridDim.x / static_cast<u32>(key_parts) / static_cast<u32>(row_parts);
  const i64 pairs_rows = static_cast<i64>(batches) * heads * rows;
  lse += static_cast<i64>(batch) * heads * rows;
  weights += static_cast<i64>(batch) * (AVERAGED ? 1 : heads) * rows * keys +
             static_cast<i64>(first) * keys + first_key;

  T* const operands = reinterpret_cast<T*>(shared);
  float* const key_added = reinterpret_cast<float*>(operands + 2 * OPERANDS);
  const auto fetch = [&](int head) {
    T* const target = operands + head % 2 * OPERANDS;
    copy_rows<ROWS, THREADS>(target, q + head * q_head, q_row, rows - first_row, threadIdx.x);
    copy_rows<CHUNK, THREADS>(target + ROWS * PITCH, k + head * k_head, k_row, keys - first_key,
                              threadIdx.x);
    copy_async_commit();
  };
  fetch(0);
  read_key_mask<CHUNK, THREADS>(
      key_added, key_mask_of(key_mask, batch * key_mask_batch + first_key * key_mask_key),
      key_mask_key, keys - first_key);

  float average[1][TILES][4];
  set_zero(average);
#pragma unroll 1
  for (int head = 0; head < heads; ++head) {
    T* const queries = operands + head % 2 * OPERANDS;
    T* const some_keys = queries + ROWS * PITCH;
    copy_async_wait<0>();
    round_rows<ROWS, THREADS>(queries, threadIdx.x);
    round_rows<CHUNK, THREADS>(some_keys, threadIdx.x);
    __syncthreads();  // and everybody is done with the other half
    if (head + 1 < heads) fetch(head + 1);

    float score[1][TILES][4];
    set_zero(score);
    multiply_heads<1, CHUNK / 16>(score, queries + warp * 16 * PITCH, some_keys);
    // The key mask in shared memory begins with this chunk.
    const Masks masks = {mask_of(mask, head * mask_head), mask_row, key_added - first_key,
                         rows, keys, factor};
    masks.apply(score[0], first + lane / 4, first_key + lane % 4 * 2);
    const float to_exponent = masks.exponent_factor();
    float lse_2[2], rest[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first + lane / 4 + 8 * h;
      const float* const own = lse + static_cast<i64>(head) * rows + row;
      lse_2[h] = row < rows ? first_of_sum(own) : INFINITE;
      rest[h] = row < rows ? second_of_sum(own, pairs_rows) : 0.0f;
    }
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        score[0][t][i] = exp2_approximate(
            __fmaf_rn(score[0][t][i], to_exponent, -lse_2[i / 2]) - rest[i / 2]);
        if (AVERAGED) average[0][t][i] += score[0][t][i];
      }
    if (!AVERAGED)
      store_weights(weights + static_cast<i64>(head) * rows * keys, rows - first, keys - first_key,
                    keys, score[0]);
  }
  if (AVERAGED) {
    const float share = __fdividef(1.0f, static_cast<float>(heads));
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) average[0][t][i] *= share;
    store_weights(weights, rows - first, keys - first_key, keys, average[0]);
  }
}
