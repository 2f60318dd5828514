// One function per PTX instruction that CUDA C++ has no word for. Sections are those of the PTX ISA manual.
#pragma once

// A generic pointer into shared memory as the 32-bit address that .shared instructions take.
__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// The same value, of unknown origin: the compiler keeps it in a register where it would compute it again in every turn of
// a loop.
__device__ __forceinline__ u32 kept(u32 value) {
    asm volatile("" : "+r"(value));
    return value;
}

// mad.wide (Integer Arithmetic): the row `index` of a matrix whose rows are `bytes` apart. The compiler would compute the
// offsets of several rows first and add the base to each.
__device__ __forceinline__ const char* at_row(const char* base, u32 index, u32 bytes) {
    const char* row;
    asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(row) : "r"(index), "r"(bytes), "l"(base));
    return row;
}

// Whether this GPU copies from global to shared memory by itself (cp.async, sm_80 and later).
#if __CUDA_ARCH__ >= 800
constexpr bool kHasCopyAsync = true;
#else
constexpr bool kHasCopyAsync = false;
#endif

// createpolicy (Cache Eviction Priority Hints): weights are read once, so they must not push activations out of L2.
__device__ __forceinline__ u64 evict_first_policy() {
    u64 policy = 0;
#if __CUDA_ARCH__ >= 800
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
    return policy;
}

// st.shared by 32-bit address: keeps address arithmetic in 32 bits, where generic pointers would take 64.
__device__ __forceinline__ void store_shared_16(u32 address, const Vec16& v) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]),
                 "r"(v.w[3])
                 : "memory");
}

// A copy of 16 bytes from global to shared memory in two halves: `fetch` starts it, `land` ends it. With cp.async (Data
// Movement, non-bulk asynchronous copy) the bytes pass no register and `land` is nothing; .cg keeps them out of L1, which
// would not see them twice. Without it they wait in registers, so that a stage is fetched while another is computed.
struct Copy16 {
    Vec16 held;

    // kTo, kFrom: bytes beyond the two addresses.
    template <int kTo = 0, int kFrom = 0>
    __device__ __forceinline__ void fetch(u32 shared, const char* global) {
#if __CUDA_ARCH__ >= 800
        asm volatile("cp.async.cg.shared.global [%0 + %2], [%1 + %3], 16;" ::"r"(shared), "l"(global), "n"(kTo),
                     "n"(kFrom)
                     : "memory");
#else
        held = load_16(global + kFrom);
#endif
    }

    template <int kTo = 0, int kFrom = 0>
    __device__ __forceinline__ void fetch(u32 shared, const char* global, u64 policy) {
#if __CUDA_ARCH__ >= 800
        asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0 + %3], [%1 + %4], 16, %2;" ::"r"(shared),
                     "l"(global), "l"(policy), "n"(kTo), "n"(kFrom)
                     : "memory");
#else
        held = load_16(global + kFrom);
#endif
    }

    // For bytes that are not copied as they are: visible to other threads after the next barrier, or landing.
    __device__ __forceinline__ void put(u32 shared, const Vec16& v) {
        if constexpr (kHasCopyAsync) {
            store_shared_16(shared, v);
        } else {
            held = v;
        }
    }

    __device__ __forceinline__ void land(u32 shared) const {
        if constexpr (!kHasCopyAsync) store_shared_16(shared, held);
    }
};

// cp.async.commit_group / wait_group: a thread waits until at most `kPending` of its newest groups are in flight.
__device__ __forceinline__ void copy_async_commit() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// ldmatrix.x4 (Warp-level Matrix Load): four 8x8 matrices of 16-bit elements; lanes 8i..8i+7 give the row addresses of
// matrix i, and lane l receives of each matrix the 32 bits at row l/4, elements 2(l%4) and 2(l%4)+1.
template <int kOffset = 0>  // bytes beyond the address
__device__ __forceinline__ void load_matrix_x4(u32 (&v)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4 + %5];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(address), "n"(kOffset)
                 : "memory");
}

// lop3 (Logic and Shift): (value & mask) | bits in one instruction; 0xea is the truth table of that expression.
template <u32 kMask, u32 kBits>
__device__ __forceinline__ u32 mask_or(u32 value) {
    u32 v;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(v) : "r"(value), "n"(kMask), "n"(kBits));
    return v;
}

// mov.b32 (Data Movement, unpack and pack): each half of a register in both halves of another. Written so, the assembler
// makes them operand modifiers of packed arithmetic, which cost neither an instruction nor a register.
__device__ __forceinline__ void spread_halves(u32 pair, u32& low, u32& high) {
    asm("{.reg .b16 l, h;\n\tmov.b32 {l, h}, %2;\n\tmov.b32 %0, {l, l};\n\tmov.b32 %1, {h, h};}"
        : "=r"(low), "=r"(high)
        : "r"(pair));
}

// prmt (Integer Arithmetic, byte permute): the four bytes of the result, low first, picked by the selector's nibbles
// from {low: 0-3, high: 4-7}.
__device__ __forceinline__ u32 permute_bytes(u32 low, u32 high, u32 selector) {
    u32 v;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(v) : "r"(low), "r"(high), "r"(selector));
    return v;
}
