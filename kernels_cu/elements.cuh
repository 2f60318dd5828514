// What a 16-bit element type must know: conversions and packed arithmetic.
#pragma once

struct Half {
    __device__ __forceinline__ static float to_float(u16 v) {
        float f;
        asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v));
        return f;
    }

    // cvt.rn.f16x2.f32 puts its first source into the upper half.
    __device__ __forceinline__ static u32 pack(float low, float high) {
        u32 v;
#if __CUDA_ARCH__ >= 800
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
#else
        asm("{.reg .f16 l, h;\n\tcvt.rn.f16.f32 l, %1;\n\tcvt.rn.f16.f32 h, %2;\n\tmov.b32 %0, {l, h};}"
            : "=r"(v)
            : "f"(low), "f"(high));
#endif
        return v;
    }

    __device__ __forceinline__ static u32 mul2(u32 a, u32 b) {
        u32 v;
        asm("mul.f16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
        return v;
    }

    __device__ __forceinline__ static u32 sub2(u32 a, u32 b) {
        u32 v;
        asm("sub.f16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
        return v;
    }

    __device__ __forceinline__ static u32 fma2(u32 a, u32 b, u32 c) {
        u32 v;
        asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(c));
        return v;
    }
};

struct Bfloat16 {
    __device__ __forceinline__ static float to_float(u16 v) { return __uint_as_float(static_cast<u32>(v) << 16); }

    __device__ __forceinline__ static u32 pack(float low, float high) {
        u32 v;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
        return v;
    }

    // Before sm_90 bfloat16 has fma alone; -0.0 as addend keeps the product as it is, its zero's sign too.
    __device__ __forceinline__ static u32 mul2(u32 a, u32 b) { return fma2(a, b, 0x80008000u); }

    __device__ __forceinline__ static u32 fma2(u32 a, u32 b, u32 c) {
        u32 v;
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(c));
        return v;
    }
};

// A pair of scales (row g in the low half, row g + 8 in the high half) of type S, as floats.
template <class S>
__device__ __forceinline__ void scales_to_float(u32 pair, float& low, float& high) {
    low = S::to_float(static_cast<u16>(pair & 0xffffu));
    high = S::to_float(static_cast<u16>(pair >> 16));
}
