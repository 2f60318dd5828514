// x[M, K] in 16 bits -> 8-bit codes[M, K] and one fp32 scale a token, reading x once: scale = max|x| / largest code,
// code = x / scale rounded half to even. One CTA a token.
#include "types.cuh"
#include "ptx.cuh"
#include "elements.cuh"
#include "mma.cuh"

// cvt (Data Movement and Conversion): rounds half to even, saturates.
__device__ __forceinline__ u32 encode_pair(float low, float high, Int8) {
    int a, b;
    asm("cvt.rni.sat.s8.f32 %0, %1;" : "=r"(a) : "f"(low));
    asm("cvt.rni.sat.s8.f32 %0, %1;" : "=r"(b) : "f"(high));
    return permute_bytes(static_cast<u32>(a), static_cast<u32>(b), 0x7740) & 0xffffu;
}

// cvt.rn.satfinite.e4m3x2.f32 puts its first source into the upper byte.
__device__ __forceinline__ u32 encode_pair(float low, float high, E4m3) {
    u16 v = 0;
#if __CUDA_ARCH__ >= 890
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(v) : "f"(high), "f"(low));
#endif
    return v;
}

__device__ __forceinline__ float largest_code(Int8) { return 127.0f; }
__device__ __forceinline__ float largest_code(E4m3) { return 448.0f; }

// Q         Int8 or E4m3: type of the codes
// T         element type of x
// kThreads  threads of a CTA
// kPieces   pieces of 8 elements that a thread keeps in registers; what is left of a longer row is read twice
// kAligned  rows of x start at multiples of 16 bytes and K is a multiple of 8
template <class Q, class T, int kThreads, int kPieces, bool kAligned>
struct QuantizeActivations {
    static constexpr int kWarps = kThreads / kWarpSize;

    __device__ __forceinline__ static Vec16 load(const u16* row, int piece, int k) {
        Vec16 v = {{0u, 0u, 0u, 0u}};
        if constexpr (kAligned) {
            if (piece * 8 < k) v = *reinterpret_cast<const Vec16*>(row + piece * 8);
        } else {
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                if (piece * 8 + e < k) v.w[e / 2] |= static_cast<u32>(row[piece * 8 + e]) << (16 * (e % 2));
            }
        }
        return v;
    }

    // 16-bit floats without their sign are ordered as integers are, NaN above infinity: a NaN is never lost.
    __device__ __forceinline__ static u32 largest(u32 so_far, const Vec16& v) {
#pragma unroll
        for (int i = 0; i < 4; ++i) so_far = max(so_far, max(v.w[i] & 0x7fffu, (v.w[i] >> 16) & 0x7fffu));
        return so_far;
    }

    // Codes are padded to whole pieces of 8 with zeros: `code_stride` is a multiple of 16.
    __device__ __forceinline__ static void store(u8* codes, int piece, int code_stride, const Vec16& v, float scale) {
        if (piece * 8 >= code_stride) return;
        u32 word[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            u32 half[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const u32 pair = v.w[2 * i + j];
                half[j] = encode_pair(__fdiv_rn(T::to_float(static_cast<u16>(pair)), scale),
                                      __fdiv_rn(T::to_float(static_cast<u16>(pair >> 16)), scale), Q());
            }
            word[i] = half[0] | half[1] << 16;
        }
        *reinterpret_cast<uint2*>(codes + piece * 8) = make_uint2(word[0], word[1]);
    }

    __device__ __forceinline__ static void run(const u16* x, u8* codes, float* scales, int k, int row_stride,
                                               int code_stride) {
        __shared__ u32 warp_largest[kWarps];
        const int thread = static_cast<int>(threadIdx.x);
        const u16* row = x + static_cast<long long>(blockIdx.x) * row_stride;
        u8* out = codes + static_cast<long long>(blockIdx.x) * code_stride;

        Vec16 kept[kPieces];
        u32 most = 0;
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            kept[i] = load(row, i * kThreads + thread, k);
            most = largest(most, kept[i]);
        }
        for (int piece = kPieces * kThreads + thread; piece * 8 < k; piece += kThreads) {
            most = largest(most, load(row, piece, k));
        }
#pragma unroll
        for (int lanes = kWarpSize / 2; lanes > 0; lanes /= 2) {
            most = max(most, __shfl_xor_sync(0xffffffffu, most, lanes));
        }
        if (thread % kWarpSize == 0) warp_largest[thread / kWarpSize] = most;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kWarps; ++i) most = max(most, warp_largest[i]);

        // A row of zeros gets the scale 1; a scale below the smallest normal float would be flushed to zero.
        float scale = __fdiv_rn(T::to_float(static_cast<u16>(most)), largest_code(Q()));
        if (most == 0) scale = 1.0f;
        if (scale < 1.17549435e-38f) scale = 1.17549435e-38f;
        if (thread == 0) scales[blockIdx.x] = scale;

#pragma unroll
        for (int i = 0; i < kPieces; ++i) store(out, i * kThreads + thread, code_stride, kept[i], scale);
        for (int piece = kPieces * kThreads + thread; piece * 8 < code_stride; piece += kThreads) {
            store(out, piece, code_stride, load(row, piece, k), scale);
        }
    }
};
