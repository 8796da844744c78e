// Stands in for warpgroup.cuh: a warpgroup's products from descriptors, by PTX's documented layouts.
//
// A product happens when its warps wait for it, and reads its operands in shared memory then: what is
// written too early, or used too soon, is found. Operands in registers are taken at once.

#include <deque>
#include <utility>

struct float2 {
  float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }

constexpr int SWIZZLED_ROW_BYTES = 128;
constexpr int swizzled(int row, int piece) {
  return row * SWIZZLED_ROW_BYTES + (piece ^ row % 8) * 16;
}

inline char* start_of_shared() {
  uintptr_t start = reinterpret_cast<uintptr_t>(emulator::current->home->shared.data());
  return reinterpret_cast<char*>((start + 1023) / 1024 * 1024);
}
inline u32 describe(const void* tile) {
  const auto address = static_cast<u32>(static_cast<const char*>(tile) - start_of_shared());
  if (address % 16 != 0 || address >= 1 << 18) std::abort();
  return address >> 4 | 1u << 16;
}
inline u32 advanced(u32 operand, int bytes) {
  if (bytes % 16 != 0) std::abort();
  return operand + bytes / 16;
}
inline u32 opaque(u32 operand) { return operand; }
inline void fence_written_operands() {}
inline void begin_products() {}
template <int TILES>
void hold(float (&)[TILES][4]) {}
inline int warpgroup_index() { return threadIdx.x / 128; }

// Element of two bytes at (row, column) of memory, from an operand's start.
inline u16 element_at(u32 operand, int row, int column) {
  if (column >= 64) std::abort();  // a second block of columns: not used
  u32 address = ((operand & 0x3fff) << 4) + row / 8 * 1024 + row % 8 * 128 + column * 2;
  address ^= (address >> 7 & 7) << 4;
  u16 bits;
  std::memcpy(&bits, start_of_shared() + address, 2);
  return bits;
}

struct Product {
  float (*sum)[4];
  int tiles;
  bool add, a_by_columns, b_by_columns, from_registers;
  u32 word[4], a, b;
};
typedef std::vector<Product> Batch;

struct Group {
  emulator::Barrier barrier;
  const Batch* of_thread[128];
};
inline Group& own_group() {
  static std::map<std::pair<const void*, int>, Group> groups;
  Group& group = groups[{emulator::current->home, threadIdx.x / 128}];
  group.barrier.members = 128;
  return group;
}
inline std::deque<Batch>& batches() {
  static std::map<const void*, std::deque<Batch>> of_fiber;
  std::deque<Batch>& own = of_fiber[emulator::current];
  if (own.empty()) own.emplace_back();
  return own;
}

template <class T>
void compute(const Batch& batch, const Group& group) {
  const int thread = threadIdx.x % 128, lane = thread % 32, first = thread / 32 * 16;
  for (size_t p = 0; p < batch.size(); ++p) {
    const Product& product = batch[p];
    for (int t = 0; t < product.tiles; ++t)
      for (int i = 0; i < 4; ++i) {
        const int row = first + lane / 4 + i / 2 * 8, column = t * 8 + lane % 4 * 2 + i % 2;
        double total = product.add ? product.sum[t][i] : 0.0;
        for (int k = 0; k < 16; ++k) {
          u16 left;
          if (product.from_registers) {
            const int holder = thread / 32 * 32 + row % 8 * 4 + k % 8 / 2;
            const u32 word = (*group.of_thread[holder])[p].word[k / 8 * 2 + row % 16 / 8];
            left = static_cast<u16>(word >> k % 2 * 16);
          } else {
            left = product.a_by_columns ? element_at(product.a, k, row)
                                        : element_at(product.a, row, k);
          }
          const u16 right = product.b_by_columns ? element_at(product.b, k, column)
                                                 : element_at(product.b, column, k);
          total += double(to_float(T{left})) * double(to_float(T{right}));
        }
        product.sum[t][i] = static_cast<float>(total);
      }
  }
}

inline void end_products() { batches().emplace_back(); }
template <int PENDING>
void wait_products() {
  std::deque<Batch>& own = batches();
  Group& group = own_group();
  while (static_cast<int>(own.size()) - 1 > PENDING) {
    group.of_thread[threadIdx.x % 128] = &own.front();
    emulator::wait(group.barrier);
    compute<T>(own.front(), group);
    emulator::wait(group.barrier);
    own.pop_front();
  }
}

template <class T, int N>
struct WarpgroupProduct {
  static_assert(N % 16 == 0 && N <= 128, "what warpgroup.cuh has");
  template <bool ADD, bool A_BY_COLUMNS, bool B_BY_COLUMNS>
  static void run(float (&sum)[N / 8][4], u32 a, u32 b) {
    const Product product = {sum, N / 8, ADD, A_BY_COLUMNS, B_BY_COLUMNS, false, {}, a, b};
    batches().back().push_back(product);
  }
  template <bool ADD, bool B_BY_COLUMNS>
  static void run(float (&sum)[N / 8][4], const u32 (&a)[4], u32 b) {
    const Product product = {sum, N / 8, ADD, false, B_BY_COLUMNS, true,
                             {a[0], a[1], a[2], a[3]}, 0, b};
    batches().back().push_back(product);
  }
};
