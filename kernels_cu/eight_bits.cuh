// From 16-bit floats to 8-bit codes: code = x / scale, rounded half to even and saturated.
// cupyq.reference.quantize_activations says the same in NumPy, bit for bit.
#pragma once

// cvt (Data Movement and Conversion): rounds half to even, saturates; NaN becomes 0.
__device__ __forceinline__ u32 encode_pair(float low, float high, Int8) {
    int a, b;
    asm("cvt.rni.sat.s8.f32 %0, %1;" : "=r"(a) : "f"(low));
    asm("cvt.rni.sat.s8.f32 %0, %1;" : "=r"(b) : "f"(high));
    return permute_bytes(static_cast<u32>(a), static_cast<u32>(b), 0x7740) & 0xffffu;
}

// cvt.rn.satfinite.e4m3x2.f32 puts its first source into the upper byte. Infinity becomes 448, NaN stays NaN.
__device__ __forceinline__ u32 encode_pair(float low, float high, E4m3) {
    u16 v = 0;
#if __CUDA_ARCH__ >= 890
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(v) : "f"(high), "f"(low));
#endif
    return v;
}

__device__ __forceinline__ float largest_code(Int8) { return 127.0f; }
__device__ __forceinline__ float largest_code(E4m3) { return 448.0f; }

// Smaller scales would be flushed to zero.
constexpr float kSmallestScale = 1.17549435e-38f;

// `range` stands for the largest magnitude, divided by the largest code. Zeros may have any scale, and 1 divides safely.
__device__ __forceinline__ float safe_scale(float range) {
    if (range == 0.0f) return 1.0f;
    return range < kSmallestScale ? kSmallestScale : range;  // NaN and infinity stay, and show in y
}

// x / scale, correctly rounded, in three instructions: a quotient from the reciprocal, and one step of correction by
// the exact remainder (Markstein, IBM J. Res. Dev. 34, 1990).
struct Divider {
    float inverse, minus;

    __device__ __forceinline__ explicit Divider(float scale) {
        inverse = __frcp_rn(scale);
        minus = inverse == 0.0f ? 0.0f : -scale;  // by infinity: zeros, and NaN where x is infinite
    }

    // kFinite: x is no infinity and the quotient does not overflow. Otherwise the correction would make NaN of both;
    // quotients so large saturate anyway.
    template <bool kFinite>
    __device__ __forceinline__ float quotient(float x) const {
        const float q = x * inverse;
        if (!kFinite && !(fabsf(q) < 1024.0f)) return q;
        return __fmaf_rn(__fmaf_rn(q, minus, x), inverse, q);
    }
};

// Eight elements of x, a 16-byte piece, to eight codes. `zero` is added to the quotient before it is rounded.
template <class Q, bool kFinite>
__device__ __forceinline__ uint2 encode_piece(const float (&v)[8], const Divider& divider, float zero) {
    u32 pair[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        pair[i] = encode_pair(divider.quotient<kFinite>(v[2 * i]) + zero,
                              divider.quotient<kFinite>(v[2 * i + 1]) + zero, Q());
    }
    return make_uint2(pair[0] | pair[1] << 16, pair[2] | pair[3] << 16);
}

template <class T>
__device__ __forceinline__ void piece_to_float(float (&v)[8], const Vec16& piece) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        v[2 * i] = T::to_float(static_cast<u16>(piece.w[i]));
        v[2 * i + 1] = T::to_float(static_cast<u16>(piece.w[i] >> 16));
    }
}

// A piece of a row of 16-bit elements; past K it is zero.
template <bool kAligned>
__device__ __forceinline__ Vec16 load_piece(const u16* row, int piece, int k) {
    Vec16 v = {{0u, 0u, 0u, 0u}};
    if constexpr (kAligned) {
        if (piece * 8 < k) v = load_16(row + piece * 8);
    } else {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            if (piece * 8 + e < k) v.w[e / 2] |= static_cast<u32>(row[piece * 8 + e]) << (16 * (e % 2));
        }
    }
    return v;
}

// The largest magnitude so far. 16-bit floats without their sign are ordered as integers are, NaN above infinity: a NaN
// is never lost. Kept in bits 16-30 (what lies below does not matter) until `magnitude_bits` takes it out.
__device__ __forceinline__ u32 larger_magnitude(u32 most, const Vec16& piece) {
#pragma unroll
    for (int i = 0; i < 4; ++i) most = max(most, max(piece.w[i] & 0x7fffffffu, (piece.w[i] << 16) & 0x7fffffffu));
    return most;
}

__device__ __forceinline__ u16 magnitude_bits(u32 most) { return static_cast<u16>(most >> 16); }

// redux.sync (Parallel Synchronization): one instruction from sm_80 on.
template <int kLanes>
__device__ __forceinline__ u32 max_of_lanes(u32 v) {
#if __CUDA_ARCH__ >= 800
    if constexpr (kLanes == kWarpSize) return __reduce_max_sync(0xffffffffu, v);
#endif
#pragma unroll
    for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) v = max(v, __shfl_xor_sync(0xffffffffu, v, lanes));
    return v;
}

// The eight values of a piece, with `factor` multiplied by it, exactly: 11 by 11 bits (8 by 8) fit 24.
template <class T, bool kAligned>
__device__ __forceinline__ void piece_values(float (&v)[8], const Vec16& piece, const u16* factor, int at, int k) {
    piece_to_float<T>(v, piece);
    if (factor != nullptr) {
        float f[8];
        piece_to_float<T>(f, load_piece<kAligned>(factor, at, k));
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] *= f[i];
    }
}

// Extent of values: bits of floats without sign, whose order is that of integers. `up` is the largest magnitude, or with
// kZeros that of the values above zero, and `down` of those below.
template <class T, bool kAligned, bool kZeros, bool kSmooth>
struct Extent {
    u32 up = 0, down = 0;

    __device__ __forceinline__ void include(const Vec16& piece, const u16* factor, int at, int k) {
        if constexpr (!kSmooth && !kZeros) {
            up = larger_magnitude(up, piece);
        } else if constexpr (!kSmooth) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const u32 flipped = piece.w[i] ^ 0x80008000u;
                up = larger(larger(up, piece.w[i]), piece.w[i] << 16);
                down = larger(larger(down, flipped), flipped << 16);
            }
        } else {
            float v[8];
            piece_values<T, kAligned>(v, piece, factor, at, k);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const u32 bits = __float_as_uint(v[i]);
                up = kZeros ? larger(up, bits) : max(up, bits & 0x7fffffffu);
                if (kZeros) down = larger(down, bits ^ 0x80000000u);
            }
        }
    }

    // Signed: what has its sign bit set is below zero, where `up` and `down` start.
    __device__ __forceinline__ static u32 larger(u32 a, u32 b) {
        return static_cast<u32>(max(static_cast<int>(a), static_cast<int>(b)));
    }

    __device__ __forceinline__ static float to_float(u32 bits) {
        return kSmooth ? __uint_as_float(bits) : T::to_float(magnitude_bits(bits));
    }

    __device__ __forceinline__ float above() const { return to_float(up); }
    __device__ __forceinline__ float below() const { return -to_float(down); }
};

// Scale and zero point of int8 codes -128..127 that cover `below` <= 0 <= `above`. Each end by itself: their difference
// could overflow.
__device__ __forceinline__ void lopsided(float above, float below, float& scale, float& zero) {
    scale = safe_scale(__fsub_rn(__fdiv_rn(above, 255.0f), __fdiv_rn(below, 255.0f)));
    zero = fminf(fmaxf(rintf(-128.0f - __fdiv_rn(below, scale)), -128.0f), 127.0f);
}
