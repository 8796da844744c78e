// Heads of at most 64 elements in half precision as operands of a warpgroup's products: rows of 128
// bytes, swizzled (warpgroup.cuh), the columns from HEAD to 64 filled with zeros.

constexpr int COLUMNS = 64;
constexpr int TILE_ROWS = 64;  // of one warpgroup's product
constexpr int TILE_BYTES = TILE_ROWS * SWIZZLED_ROW_BYTES;
constexpr int STEP_BYTES = 32;                           // 16 columns, where an operand lies by rows
constexpr int ACROSS_BYTES = 16 * SWIZZLED_ROW_BYTES;    // 16 rows, where it lies by columns
static_assert(HALF && HEAD <= COLUMNS, "heads of half precision that fill one swizzled row");

// Starts copying `count` rows of a head and fills up with zeros to ROWS; `thread` of THREADS.
template <int ROWS, int THREADS, class From>
__device__ __forceinline__ void copy_swizzled(char* target, const From* source, i64 stride,
                                              int count, int thread) {
  constexpr int PIECES = SWIZZLED_ROW_BYTES / 16, STEP_ROWS = THREADS / PIECES;
  static_assert(STEP_ROWS % 8 == 0, "a thread's pieces are swizzled alike");
  const int row = thread / PIECES, piece = thread % PIECES;
  const From* from = source + row * stride + piece * VECTOR;
  target += swizzled(row, piece);
  const i64 step = STEP_ROWS * stride;
#pragma unroll
  for (int first = 0; first < ROWS; first += STEP_ROWS) {
    if (ROWS % STEP_ROWS != 0 && first + row >= ROWS) break;
    const bool copy = first + row < count && piece * VECTOR < HEAD;
    copy_async_or_zeros(target + first * SWIZZLED_ROW_BYTES, from, copy);
    from += step;
  }
}

// sum[64][N] = a [64][COLUMNS] times the transpose of b [N][COLUMNS].
template <int N>
__device__ __forceinline__ void start_scores(float (&sum)[N / 8][4], u32 a, u32 b) {
  typedef WarpgroupProduct<T, N> Product;
  Product::template run<false, false, false>(sum, a, b);
#pragma unroll
  for (int step = 1; step < COLUMNS / 16; ++step)
    Product::template run<true, false, false>(sum, advanced(a, step * STEP_BYTES),
                                              advanced(b, step * STEP_BYTES));
}
// sum[64][COLUMNS] = left [64][8 TILES], a result, times right [8 TILES][COLUMNS]; added to what it is
// where `add`, which the compiler must know.
template <int TILES>
__device__ __forceinline__ void start_sums(float (&sum)[COLUMNS / 8][4], const Kept<TILES>& left,
                                           u32 right, bool add = true) {
  typedef WarpgroupProduct<T, COLUMNS> Product;
#pragma unroll
  for (int step = 0; step < TILES / 2; ++step) {
    u32 a[4];
    left.as_left(a, step);
    const u32 some = advanced(right, step * ACROSS_BYTES);
    if (add || step > 0)
      Product::template run<true, true>(sum, a, some);
    else
      Product::template run<false, true>(sum, a, some);
  }
}
