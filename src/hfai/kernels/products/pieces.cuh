// How a matrix lies that was taken apart: see split.cu.
//
// A row of a piece is 64 bytes, DEPTH elements of one plane; its four parts of 16 bytes are swapped
// by the hardware's 64-byte swizzle, so that neither who writes nor who multiplies meets a bank twice.

constexpr int ROWS = 128, DEPTH = 32, ROW_BYTES = 64;
constexpr int PLANE_BYTES = ROWS * ROW_BYTES;
constexpr int PIECE_BYTES = 3 * PLANE_BYTES + 16;   // what is copied
constexpr int PIECE_PITCH = 3 * PLANE_BYTES + 128;  // bytes from one piece to the next
constexpr float LARGEST = 3.402823466e38f;          // fp32's

__host__ __device__ constexpr int place(int row, int part) {
  return row * ROW_BYTES + (part ^ row / 2 % 4) * 16;
}
