// Keeping out of a core's own caches what a GPU is to fetch next.
//
// Measured on H200s of one host: copy engines fetch at 47 GiB/s what lies in memory or in the cache
// that all cores share, and at 24 to 42 what a core has stored or read last; chunks of sums that
// adders had just stored came at as little as 10, above all once the adders slept.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#if defined(__SSE2__)
#include <cpuid.h>
#include <emmintrin.h>
#endif

namespace hfreduce {

// Where sums are left for the GPU: in the cache that all cores share, alone or with what they were
// added from, or either by the size of the call; in memory; or wherever the processor leaves what a
// core stores.
enum class Leave { kBySize, kShared, kSums, kMemory, kCore };

// Up to which a call's sources are handed on too. Measured by two ranks that share an H200: of 64 KiB
// an adder then takes 20 to 25 µs in place of 14 to 18 (7 to 9 where nothing is handed on), and a
// copy back 40 % less, since no copy out has to fetch lines from cores. 25 MiB, which wait for the
// copies, gain a tenth by it, and 1 GiB, which waits for the adders, loses.
constexpr int64_t kSourcesBytes = 32 << 20;

// Whether the processor can be asked to hand lines on to the shared cache (Intel, from 2023 on).
inline bool can_hand_on() {
#if defined(__SSE2__)
  unsigned a, b, c = 0, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c >> 25 & 1);  // CLDEMOTE
#else
  return false;
#endif
}

// Returns the best place on this processor, or the one that HFREDUCE_CACHES names.
inline Leave where_to_leave() {
  const char *named = std::getenv("HFREDUCE_CACHES");
  if (!named || !*named) return can_hand_on() ? Leave::kBySize : Leave::kMemory;
  const std::string name = named;
  if (name == "size") return Leave::kBySize;
  if (name == "shared") return Leave::kShared;
  if (name == "sums") return Leave::kSums;
  if (name == "memory") return Leave::kMemory;
  if (name == "core") return Leave::kCore;
  throw std::runtime_error("HFREDUCE_CACHES=" + name +
                           " is not known: use size, shared, sums, memory or core");
}

// Asks for lines to be handed on; a hint that processors without it ignore.
inline void hand_on(const void *memory, size_t bytes) {
#if defined(__SSE2__)
  const char *line = static_cast<const char *>(memory);
  for (const char *end = line + bytes; line < end; line += 64)
    asm volatile("cldemote %0" ::"m"(*line));
#else
  (void)memory, (void)bytes;
#endif
}

// Copies to memory past all caches, which costs its bandwidth; `settle` before anyone is told.
inline void copy_past_caches(void *to, const void *from, size_t bytes) {
#if defined(__SSE2__)
  if (reinterpret_cast<uintptr_t>(to) % 64 == 0) {
    auto *target = static_cast<__m128i *>(to);
    auto *source = static_cast<const __m128i *>(from);
    for (size_t lines = bytes / 64; lines; --lines, target += 4, source += 4) {
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
