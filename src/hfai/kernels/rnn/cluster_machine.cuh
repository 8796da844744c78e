// How blocks of a cluster of SIZE hand each other values, a step at a time, through their shared
// memory. For devices with clusters (sm_90 and later).
//
// A store into another block's shared memory takes with it how many bytes it was, and the receiver's
// barrier for this step (`Arrivals`) counts them: who waits for the barrier sees all that was stored.
// A block that is alone waits for its own threads.

typedef u32 SharedAddress;

__device__ __forceinline__ SharedAddress shared_address(const void* place) {
  return static_cast<u32>(__cvta_generic_to_shared(place));
}
// Where block `rank` of the cluster has what is at `address` in this block.
template <int SIZE>
__device__ __forceinline__ SharedAddress in_block(SharedAddress address, int rank) {
  if constexpr (SIZE == 1) return address;
  SharedAddress there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

// Stores 4, 8 or 16 bytes to where `in_block` points, and reports them to that block's barrier.
template <int SIZE>
__device__ __forceinline__ void send(SharedAddress target, SharedAddress barrier, u32 word) {
  if constexpr (SIZE == 1)
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(target), "r"(word) : "memory");
  else
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(
                     target),
                 "r"(word), "r"(barrier)
                 : "memory");
}
template <int SIZE>
__device__ __forceinline__ void send(SharedAddress target, SharedAddress barrier, u32 first,
                                     u32 second) {
  if constexpr (SIZE == 1)
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(target), "r"(first), "r"(second)
                 : "memory");
  else
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [%0], {%1, %2}, [%3];" ::"r"(
            target),
        "r"(first), "r"(second), "r"(barrier)
        : "memory");
}
template <int SIZE>
__device__ __forceinline__ void send(SharedAddress target, SharedAddress barrier, u32 first,
                                     u32 second, u32 third, u32 fourth) {
  if constexpr (SIZE == 1)
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(target), "r"(first), "r"(second),
                 "r"(third), "r"(fourth)
                 : "memory");
  else
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, "
        "[%5];" ::"r"(target),
        "r"(first), "r"(second), "r"(third), "r"(fourth), "r"(barrier)
        : "memory");
}

// Barriers in shared memory, 8 bytes each. One thread sets them up, before `wait_for_cluster`, and
// tells each, once for every round, how many bytes will come.
__device__ __forceinline__ void set_up_barrier(SharedAddress barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void expect_bytes(SharedAddress barrier, u32 bytes) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1; }" ::"r"(
                   barrier),
               "r"(bytes)
               : "memory");
}
// Returns whether a round of the given parity (0, 1, 0, ...) is complete; it may wait for a while.
__device__ __forceinline__ bool is_complete(SharedAddress barrier, u32 parity) {
  u32 complete;
  asm volatile(
      "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; "
      "selp.u32 %0, 1, 0, p; }"
      : "=r"(complete)
      : "r"(barrier), "r"(parity)
      : "memory");
  return complete != 0;
}

__device__ __forceinline__ u64 nanoseconds() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// All threads of all blocks of the cluster.
template <int SIZE>
__device__ __forceinline__ void wait_for_cluster() {
  if constexpr (SIZE == 1)
    __syncthreads();
  else
    cluster_barrier();
}
