// Waiting for what a step needs, within a cluster. Two places are used in turn, each with a barrier:
// a place is written again only by those who have received what was made from its last content.
//
// Waiting is bounded, here by PATIENCE nanoseconds: a wait in vain marks `status`, and everybody gives
// up in turn.

constexpr int PLACES = 2;

template <int SIZE>
struct Arrivals {
  SharedAddress barriers;  // of this block, [PLACES] of 8 bytes
  u32 bytes;               // that a step brings

  // By all threads, before `wait_for_cluster`.
  __device__ Arrivals(SharedAddress barriers, u32 bytes) : barriers(barriers), bytes(bytes) {
    if constexpr (SIZE > 1)
      if (threadIdx.x == 0)
        for (int place = 0; place < PLACES; ++place) {
          set_up_barrier(barriers + place * 8);
          expect_bytes(barriers + place * 8, bytes);
        }
  }

  // Waits for step `step` (0, 1, ...), each of which every warp, or at least the first, waits for.
  __device__ __forceinline__ void wait(int step, Patience& patience) const {
    if constexpr (SIZE > 1) {
      const SharedAddress barrier = barriers + step % PLACES * 8;
      const u32 parity = step / PLACES % 2;
      if (!is_complete(barrier, parity)) {
        const u64 since = nanoseconds();
        while (!is_complete(barrier, parity)) {
          if (nanoseconds() - since < PATIENCE) continue;
          store_shared_by_device(patience.status, 1u);
          patience.lost = true;
          break;
        }
      }
      if (threadIdx.x == 0) expect_bytes(barrier, bytes);  // of the step after the next
    } else {
      __syncthreads();
    }
  }
};
