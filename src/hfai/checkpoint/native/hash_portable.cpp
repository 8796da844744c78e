// The instruction set that the compiler assumes: SSE2 on x86-64, NEON on Arm.
#define CHECKPOINT_WAY kPortable
#define CHECKPOINT_NAME "portable"
#include "hash_way.inc"
