// CRC-32 by the instructions of 64-bit Arm, eight bytes at a time.
//
// crc32b and crc32x are zlib's polynomial (crc32cb and crc32cx would be Castagnoli's). Optional in
// Armv8.0 and part of every later version, so they are looked for.
#pragma once

#include <asm/hwcap.h>
#include <sys/auxv.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace ffrecord {

inline bool has_crc_instructions() { return getauxval(AT_HWCAP) & HWCAP_CRC32; }

inline uint32_t crc_by_instructions(const uint8_t *data, size_t size, uint32_t state) {
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  for (; size >= 8; size -= 8, data += 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    // As text, because not every compiler has the intrinsics without a flag for the whole file.
    asm(".arch_extension crc\n\tcrc32x %w0, %w0, %x1" : "+r"(state) : "r"(word));
  }
#endif
  for (; size; --size, ++data)
    asm(".arch_extension crc\n\tcrc32b %w0, %w0, %w1" : "+r"(state) : "r"(uint32_t{*data}));
  return state;
}

}  // namespace ffrecord
