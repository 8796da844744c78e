// CRC-32 by carry-less multiplication, after V. Gopal et al., "Fast CRC Computation for Generic
// Polynomials Using PCLMULQDQ Instruction" (Intel, 2009).
//
// Four lanes of 128 bits are folded at a time, or with AVX-512 four registers of four lanes. To fold
// is to multiply a lane by x^distance modulo the polynomial and add it to the data that far ahead.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace ffrecord {

// x^power modulo the polynomial, reflected and shifted as a factor of a reflected product.
constexpr long long crc_factor(int power) {
  uint32_t value = 1;
  for (; power; --power) value = (value << 1) ^ (value >> 31 ? 0x04C11DB7u : 0);
  uint32_t reflected = 0;
  for (int bit = 0; bit < 32; ++bit) reflected |= (value >> bit & 1) << (31 - bit);
  return static_cast<long long>(reflected) << 1;
}

// The two factors, low and high, that move a lane forward by a distance in bits.
template <int kDistance>
struct FoldBy {
  static constexpr long long low = crc_factor(kDistance + 32), high = crc_factor(kDistance - 32);
};
static_assert(FoldBy<512>::low == 0x154442bd4 && FoldBy<512>::high == 0x1c6e41596,
              "the constants of the paper");

inline bool has_carryless_multiplication() {
  return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
}

inline bool has_wide_multiplication() {
  return has_carryless_multiplication() && __builtin_cpu_supports("vpclmulqdq") &&
         __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl");
}

#define FFRECORD_NARROW __attribute__((target("pclmul,sse4.1")))
#define FFRECORD_WIDE __attribute__((target("pclmul,sse4.1,vpclmulqdq,avx512f,avx512vl")))

// One step of a fold: `lane` moved forward by the distance that `by` stands for, plus `data`.
FFRECORD_NARROW inline __m128i fold(__m128i lane, __m128i by, __m128i data) {
  return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(lane, by, 0x00),
                                     _mm_clmulepi64_si128(lane, by, 0x11)),
                       data);
}

// The last step: four neighbouring lanes, then whole lanes of `data` (size is a multiple of 16), to
// 128 bits, to 64, to 32 by Barrett's reduction.
FFRECORD_NARROW inline uint32_t reduce(__m128i a, __m128i b, __m128i c, __m128i d,
                                       const uint8_t *data, size_t size) {
  const __m128i by_128 = _mm_set_epi64x(FoldBy<128>::high, FoldBy<128>::low);
  const __m128i by_64 = _mm_set_epi64x(0, crc_factor(64));
  const __m128i barrett = _mm_set_epi64x(0x1f7011641, 0x1db710641);
  const __m128i low_words = _mm_set_epi32(0, -1, 0, -1);
  a = fold(fold(fold(a, by_128, b), by_128, c), by_128, d);
  for (; size; data += 16, size -= 16)
    a = fold(a, by_128, _mm_loadu_si128(reinterpret_cast<const __m128i *>(data)));
  a = _mm_xor_si128(_mm_srli_si128(a, 8), _mm_clmulepi64_si128(a, by_128, 0x10));
  a = _mm_xor_si128(_mm_srli_si128(a, 4),
                    _mm_clmulepi64_si128(_mm_and_si128(a, low_words), by_64, 0x00));
  __m128i quotient = _mm_clmulepi64_si128(_mm_and_si128(a, low_words), barrett, 0x10);
  quotient = _mm_clmulepi64_si128(_mm_and_si128(quotient, low_words), barrett, 0x00);
  return static_cast<uint32_t>(_mm_extract_epi32(_mm_xor_si128(a, quotient), 1));
}

FFRECORD_NARROW inline uint32_t crc_by_folding(const uint8_t *data, size_t size, uint32_t state) {
  if (size < 64) return crc_by_table(data, size, state);
  const __m128i by_512 = _mm_set_epi64x(FoldBy<512>::high, FoldBy<512>::low);
  auto load = [&](size_t at) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i *>(data + at));
  };
  __m128i a = _mm_xor_si128(load(0), _mm_cvtsi32_si128(static_cast<int>(state)));
  __m128i b = load(16), c = load(32), d = load(48);
  for (data += 64, size -= 64; size >= 64; data += 64, size -= 64) {
    a = fold(a, by_512, load(0));
    b = fold(b, by_512, load(16));
    c = fold(c, by_512, load(32));
    d = fold(d, by_512, load(48));
  }
  const size_t whole = size & ~size_t{15};
  state = reduce(a, b, c, d, data, whole);
  return crc_by_table(data + whole, size - whole, state);
}

FFRECORD_WIDE inline __m512i load_wide(const uint8_t *data) { return _mm512_loadu_si512(data); }

FFRECORD_WIDE inline __m512i fold_wide(__m512i lanes, __m512i by, __m512i data) {
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(lanes, by, 0x00),
                                   _mm512_clmulepi64_epi128(lanes, by, 0x11), data,
                                   0x96);  // the exclusive or of three
}

FFRECORD_WIDE inline uint32_t crc_by_wide_folding(const uint8_t *data, size_t size,
                                                  uint32_t state) {
  if (size < 256) return crc_by_folding(data, size, state);
  const __m512i by_2048 =
      _mm512_broadcast_i32x4(_mm_set_epi64x(FoldBy<2048>::high, FoldBy<2048>::low));
  const __m512i by_512 =
      _mm512_broadcast_i32x4(_mm_set_epi64x(FoldBy<512>::high, FoldBy<512>::low));
  __m512i a = _mm512_xor_si512(
      load_wide(data), _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(state))));
  __m512i b = load_wide(data + 64), c = load_wide(data + 128), d = load_wide(data + 192);
  for (data += 256, size -= 256; size >= 256; data += 256, size -= 256) {
    a = fold_wide(a, by_2048, load_wide(data));
    b = fold_wide(b, by_2048, load_wide(data + 64));
    c = fold_wide(c, by_2048, load_wide(data + 128));
    d = fold_wide(d, by_2048, load_wide(data + 192));
  }
  a = fold_wide(fold_wide(fold_wide(a, by_512, b), by_512, c), by_512, d);
  for (; size >= 64; data += 64, size -= 64) a = fold_wide(a, by_512, load_wide(data));
  const size_t whole = size & ~size_t{15};
  state = reduce(_mm512_extracti32x4_epi32(a, 0), _mm512_extracti32x4_epi32(a, 1),
                 _mm512_extracti32x4_epi32(a, 2), _mm512_extracti32x4_epi32(a, 3), data, whole);
  return crc_by_table(data + whole, size - whole, state);
}

#undef FFRECORD_NARROW
#undef FFRECORD_WIDE

}  // namespace ffrecord
