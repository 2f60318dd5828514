// What a 16-bit element type must know: conversions, packed arithmetic, and how a word of nibbles becomes a fragment.
#pragma once

// The zero points of a lane's two rows, in the form the dequantizer of the type wants.
struct ZeroPair {
    u32 low;   // row g
    u32 high;  // row g + 8
};

struct Half {
    __device__ __forceinline__ static float to_float(u16 v) {
        float f;
        asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v));
        return f;
    }

    // cvt.rn.f16x2.f32 puts its first source into the upper half.
    __device__ __forceinline__ static u32 pack(float low, float high) {
        u32 v;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
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

    // 1024 + z for low nibbles; -(64 + z) for high nibbles, whose codes arrive sixteenfold. Both exact.
    __device__ __forceinline__ static ZeroPair symmetric_zero() { return {0x64086408u, 0xd480d480u}; }

    // `pair` holds z of row g in byte 0, of row g + 8 in byte 1.
    __device__ __forceinline__ static ZeroPair zero_pair(u32 pair) {
        return {permute_bytes(pair, 0x64u, 0x4040), (pair >> 8) * 0x00100010u + 0xd400d400u};
    }

    // Eight nibbles -> A fragment of q - z, exact: OR-ing a nibble into the mantissa of 1024.0 makes 1024 + q (low mask)
    // or 1024 + 16 q (high mask); the nibble order puts row g under the low mask and row g + 8 under the high one.
    __device__ __forceinline__ static void dequantize(u32 (&a)[4], u32 word, ZeroPair zero) {
        const u32 next = word >> 8;
        a[0] = sub2(mask_or<0x000f000fu, 0x64006400u>(word), zero.low);
        a[1] = fma2(mask_or<0x00f000f0u, 0x64006400u>(word), 0x2c002c00u, zero.high);
        a[2] = sub2(mask_or<0x000f000fu, 0x64006400u>(next), zero.low);
        a[3] = fma2(mask_or<0x00f000f0u, 0x64006400u>(next), 0x2c002c00u, zero.high);
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

    // -(128 + z), exact in bfloat16's eight significant bits for z up to 127.
    __device__ __forceinline__ static ZeroPair symmetric_zero() { return {0xc308c308u, 0xc308c308u}; }

    __device__ __forceinline__ static ZeroPair zero_pair(u32 pair) {
        return {permute_bytes(pair, 0xc3u, 0x4040), permute_bytes(pair, 0xc3u, 0x4141)};
    }

    // Only the low nibble fits bfloat16's mantissa (128 + q), so each quarter is shifted down first.
    __device__ __forceinline__ static void dequantize(u32 (&a)[4], u32 word, ZeroPair zero) {
        constexpr u32 kOne = 0x3f803f80u;
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const u32 biased = mask_or<0x000f000fu, 0x43004300u>(word >> (4 * r));
            a[r] = fma2(biased, kOne, r & 1 ? zero.high : zero.low);
        }
    }
};

// A pair of scales (row g in the low half, row g + 8 in the high half) of type S, as floats.
template <class S>
__device__ __forceinline__ void scales_to_float(u32 pair, float& low, float& high) {
    low = S::to_float(static_cast<u16>(pair & 0xffffu));
    high = S::to_float(static_cast<u16>(pair >> 16));
}
