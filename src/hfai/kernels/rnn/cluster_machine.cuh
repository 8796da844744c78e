// Shared memory of a cluster of SIZE blocks: stores that other blocks see and loads that see them,
// without a barrier. For devices with clusters (sm_90 and later).

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

// Relaxed accesses at the cluster's scope: each 32-bit word arrives whole, and nothing is promised of
// the order of different words, so every word must tell by itself whether it has arrived.
template <int SIZE>
__device__ __forceinline__ void store_in_cluster(SharedAddress target, u32 word) {
  if constexpr (SIZE == 1)
    asm volatile("st.volatile.shared.u32 [%0], %1;" ::"r"(target), "r"(word) : "memory");
  else
    asm volatile("st.relaxed.cluster.shared::cluster.u32 [%0], %1;" ::"r"(target), "r"(word)
                 : "memory");
}
template <int SIZE>
__device__ __forceinline__ void store_in_cluster(SharedAddress target, u32 first, u32 second) {
  if constexpr (SIZE == 1)
    asm volatile("st.volatile.shared.v2.u32 [%0], {%1, %2};" ::"r"(target), "r"(first), "r"(second)
                 : "memory");
  else
    asm volatile("st.relaxed.cluster.shared::cluster.v2.u32 [%0], {%1, %2};" ::"r"(target),
                 "r"(first), "r"(second)
                 : "memory");
}
template <int SIZE>
__device__ __forceinline__ void store_in_cluster(SharedAddress target, u32 first, u32 second,
                                                 u32 third, u32 fourth) {
  if constexpr (SIZE == 1)
    asm volatile("st.volatile.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(target), "r"(first),
                 "r"(second), "r"(third), "r"(fourth)
                 : "memory");
  else
    asm volatile("st.relaxed.cluster.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(target),
                 "r"(first), "r"(second), "r"(third), "r"(fourth)
                 : "memory");
}
__device__ __forceinline__ void load_from_cluster(u32 (&word)[4], SharedAddress source) {
  asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
               : "r"(source)
               : "memory");
}
__device__ __forceinline__ u32 load_from_cluster(SharedAddress source) {
  u32 word;
  asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(word) : "r"(source) : "memory");
  return word;
}

// All threads of all blocks of the cluster.
template <int SIZE>
__device__ __forceinline__ void wait_for_cluster() {
  if constexpr (SIZE == 1)
    __syncthreads();
  else
    cluster_barrier();
}
