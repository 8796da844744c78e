// CRC-32 as zlib computes it (IEEE 802.3, reflected), by the fastest way that this CPU has.
//
// x86-64: carry-less multiplication, 64 bytes a step, or 256 with AVX-512 (crc32_x86.hpp). Arm: its
// CRC instructions (crc32_arm.hpp). Elsewhere, and for the last few bytes: tables, 8 bytes a step.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace ffrecord {

constexpr uint32_t kPolynomial = 0xEDB88320u;  // reflected

using CrcTables = std::array<std::array<uint32_t, 256>, 8>;

constexpr CrcTables make_crc_tables() {
  CrcTables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ (value & 1 ? kPolynomial : 0);
    tables[0][byte] = value;
  }
  for (uint32_t byte = 0; byte < 256; ++byte)
    for (size_t k = 1; k < 8; ++k)
      tables[k][byte] = (tables[k - 1][byte] >> 8) ^ tables[0][tables[k - 1][byte] & 255];
  return tables;
}

inline constexpr CrcTables kCrcTables = make_crc_tables();

// `state` is the checksum with all bits flipped, here and in the other ways.
inline uint32_t crc_by_table(const uint8_t *data, size_t size, uint32_t state) {
  const auto &t = kCrcTables;
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  for (; size >= 8; size -= 8, data += 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    word ^= state;
    state = t[7][word & 255] ^ t[6][word >> 8 & 255] ^ t[5][word >> 16 & 255] ^
            t[4][word >> 24 & 255] ^ t[3][word >> 32 & 255] ^ t[2][word >> 40 & 255] ^
            t[1][word >> 48 & 255] ^ t[0][word >> 56];
  }
#endif
  for (; size; --size) state = (state >> 8) ^ t[0][(state ^ *data++) & 255];
  return state;
}

}  // namespace ffrecord

#if defined(__x86_64__)
#include "crc32_x86.hpp"
#elif defined(__aarch64__) && defined(__linux__)
#include "crc32_arm.hpp"
#endif

namespace ffrecord {

struct CrcWay {
  const char *name;
  bool (*works)();
  uint32_t (*update)(const uint8_t *data, size_t size, uint32_t state);
};

// The fastest first; the last one always works.
inline constexpr CrcWay kCrcWays[] = {
#if defined(__x86_64__)
    {"AVX-512 carry-less multiplication", has_wide_multiplication, crc_by_wide_folding},
    {"carry-less multiplication", has_carryless_multiplication, crc_by_folding},
#elif defined(__aarch64__) && defined(__linux__)
    {"Arm CRC instructions", has_crc_instructions, crc_by_instructions},
#endif
    {"tables", [] { return true; }, crc_by_table},
};

inline const CrcWay &best_crc_way() {
  static const CrcWay &best = [&]() -> const CrcWay & {
    size_t i = 0;
    while (!kCrcWays[i].works()) ++i;
    return kCrcWays[i];
  }();
  return best;
}

inline uint32_t crc32(const uint8_t *data, size_t size) {
  return ~best_crc_way().update(data, size, ~0u);
}

}  // namespace ffrecord
