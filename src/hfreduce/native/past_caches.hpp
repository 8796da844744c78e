// Writing to memory past the caches.
//
// What a GPU is to fetch next should not lie in the private cache of a core: measured on H200s, copy
// engines fetched sums that adders had just stored at 10 GiB/s where the same lines came from memory
// at 45, above all once the adders' cores had gone to sleep and had to be asked for each line.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace hfreduce {

// Copies so that the target lies in no cache; `settle` before anyone is told.
inline void copy_past_caches(void *to, const void *from, size_t bytes) {
#if defined(__SSE2__)
  if (reinterpret_cast<uintptr_t>(to) % 64 == 0) {
    auto *target = static_cast<__m128i *>(to);
    auto *source = static_cast<const __m128i *>(from);
    const size_t lines = bytes / 64;
    for (size_t i = 0; i < lines; ++i, target += 4, source += 4) {
      const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
      const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
      _mm_stream_si128(target, a);  // a whole line at once: the processor then reads nothing
      _mm_stream_si128(target + 1, b);
      _mm_stream_si128(target + 2, c);
      _mm_stream_si128(target + 3, d);
    }
    std::memcpy(target, source, bytes % 64);
    return;
  }
#endif
  std::memcpy(to, from, bytes);
}

// Everything this thread has copied past the caches is seen by whoever sees what it writes next.
inline void settle() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace hfreduce
