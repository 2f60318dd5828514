// One function per PTX instruction that CUDA C++ has no word for. Sections are those of the PTX ISA manual.
#pragma once

// A generic pointer into shared memory as the 32-bit address that .shared instructions take.
__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// createpolicy (Cache Eviction Priority Hints): weights are read once, so they must not push activations out of L2.
__device__ __forceinline__ u64 evict_first_policy() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// cp.async (Data Movement, non-bulk asynchronous copy): global to shared with no register in between.
// .cg keeps the bytes out of L1, which would not see them twice.
__device__ __forceinline__ void copy_async_16(u32 shared, const void* global, u64 policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "l"(policy)
                 : "memory");
}

// The same for data that others read too; `bytes` (0 or 16) are read, the rest of the 16 is filled with zeros.
__device__ __forceinline__ void copy_async_16_or_zero(u32 shared, const void* global, u32 bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy_async_16(u32 shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

// cp.async.commit_group / wait_group: a thread waits until at most `kPending` of its newest groups are in flight.
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ld/st.shared by 32-bit address: keeps address arithmetic in 32 bits, where generic pointers would take 64.
__device__ __forceinline__ Vec16 load_shared_16(u32 address) {
    Vec16 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
                 : "r"(address)
                 : "memory");
    return v;
}

__device__ __forceinline__ u32 load_shared_4(u32 address) {
    u32 v;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ u32 load_shared_2(u32 address) {
    u16 v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ void store_shared_2(u32 address, u16 v) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(v) : "memory");
}

__device__ __forceinline__ void store_shared_1(u32 address, u32 v) {
    asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

__device__ __forceinline__ void store_shared_16(u32 address, const Vec16& v) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]),
                 "r"(v.w[3])
                 : "memory");
}

// ldmatrix.x4 (Warp-level Matrix Load): four 8x8 matrices of 16-bit elements; lanes 8i..8i+7 give the row addresses of
// matrix i, and lane l receives of each matrix the 32 bits at row l/4, elements 2(l%4) and 2(l%4)+1.
__device__ __forceinline__ void load_matrix_x4(u32 (&v)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(address)
                 : "memory");
}

// lop3 (Logic and Shift): (value & mask) | bits in one instruction; 0xea is the truth table of that expression.
template <u32 kMask, u32 kBits>
__device__ __forceinline__ u32 mask_or(u32 value) {
    u32 v;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(v) : "r"(value), "n"(kMask), "n"(kBits));
    return v;
}

// prmt (Integer Arithmetic, byte permute): the four bytes of the result, low first, picked by the selector's nibbles
// from {low: 0-3, high: 4-7}.
__device__ __forceinline__ u32 permute_bytes(u32 low, u32 high, u32 selector) {
    u32 v;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(v) : "r"(low), "r"(high), "r"(selector));
    return v;
}
