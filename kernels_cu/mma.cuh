// Tensor-core instructions and which lane holds what. Layouts: PTX ISA, "Matrix Fragments for mma.m16n8k16" and
// "... mma.m16n8k32". With g = lane / 4, t = lane % 4, and e elements to a 32-bit register (2, or 4 for 8-bit types):
//   A (16 x K, rows = features): register r holds row g + 8 (r & 1), k from e t + 4 e (r >> 1)
//   B (K x 8, columns = tokens): register r holds column g, k from e t + 4 e r
//   C, D (16 x 8): element c holds row g + 8 (c >> 1), column 2 t + (c & 1)
// cupyq/layout.py states the same tables for Python; tests compare the two through the emulator.
#pragma once

// run: D += A B. start: D = A B.
template <class T>
struct Mma;

// D = 0: a product of zeros sets four registers with one instruction where that is one product.
template <class T>
__device__ __forceinline__ void clear(float (&d)[4]) {
#if __CUDA_ARCH__ >= 800
    const u32 none[4] = {0u, 0u, 0u, 0u};
    Mma<T>::start(d, none, 0u, 0u);
#else
    d[0] = d[1] = d[2] = d[3] = 0.0f;
#endif
}

#if __CUDA_ARCH__ >= 800

template <>
struct Mma<Half> {
    __device__ __forceinline__ static void run(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }

    __device__ __forceinline__ static void start(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%10, %10, %10, %10};"
            : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
    }
};

template <>
struct Mma<Bfloat16> {
    __device__ __forceinline__ static void run(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }

    __device__ __forceinline__ static void start(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%10, %10, %10, %10};"
            : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
    }
};

#else  // Turing: half the k in one instruction, the same lanes

template <>
struct Mma<Half> {
    __device__ __forceinline__ static void half(float (&d)[4], u32 a0, u32 a1, u32 b, const float (&c)[4]) {
        asm volatile(
            "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %8, %9, %10};"
            : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
            : "r"(a0), "r"(a1), "r"(b), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
    }

    __device__ __forceinline__ static void run(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        half(d, a[0], a[1], b0, d);
        half(d, a[2], a[3], b1, d);
    }

    __device__ __forceinline__ static void start(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        d[0] = d[1] = d[2] = d[3] = 0.0f;
        run(d, a, b0, b1);
    }
};

#endif

// 8-bit weights and activations. Accumulator: the type the tensor core sums in.
struct Int8 {
    using Accumulator = int;
};

struct E4m3 {
    using Accumulator = float;
};

#if __CUDA_ARCH__ >= 800

template <>
struct Mma<Int8> {
    __device__ __forceinline__ static void run(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        asm volatile(
            "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};

#else  // Turing: a quarter in one instruction, eight rows and 16 k; the lanes are those of the larger fragment's parts

template <>
struct Mma<Int8> {
    __device__ __forceinline__ static void quarter(int& d0, int& d1, u32 a, u32 b) {
        asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
                     : "+r"(d0), "+r"(d1)
                     : "r"(a), "r"(b));
    }

    __device__ __forceinline__ static void run(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        quarter(d[0], d[1], a[0], b0);
        quarter(d[2], d[3], a[1], b0);
        quarter(d[0], d[1], a[2], b1);
        quarter(d[2], d[3], a[3], b1);
    }
};

#endif

template <>
struct Mma<E4m3> {
    __device__ __forceinline__ static void run(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 890
        asm volatile(
            "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
    }

    __device__ __forceinline__ static void start(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 890
        asm volatile(
            "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%10, %10, %10, %10};"
            : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
#endif
    }
};
