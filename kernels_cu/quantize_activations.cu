// x[M, K] in 16 bits -> 8-bit codes[M, K] and fp32 scales, reading x once. One CTA a token.
//
//   kToken    a scale a token, max|x| / largest code; with kZeros (int8) (max - min) / 255 and a zero point
//   kTensor   scale and zero point are known beforehand, one for all tokens
//   kBlock    a scale for every 128 k of a token
//
// With kSmooth x[:, k] is first multiplied by factor[k].
#include "types.cuh"
#include "ptx.cuh"
#include "elements.cuh"
#include "mma.cuh"
#include "eight_bits.cuh"

enum class Scales { kToken, kTensor, kBlock };

struct QuantizeArguments {
    const u16* x;
    const u16* factor;  // kSmooth: [K] of x's type
    const float* tensor_scale;
    const int* tensor_zero;  // kTensor: or null
    u8* codes;
    float* scales;  // kToken: [M]; kBlock: [K / 128][scale_stride]
    int* zeros;     // kToken with kZeros: [M]
    int k, row_stride, code_stride, scale_stride;
};

// Q         Int8 or E4m3: type of the codes
// T         element type of x
// kThreads  threads of a CTA
// kPieces   pieces of 8 elements that a thread keeps in registers; what is left of a longer row is read twice
// kAligned  rows of x start at multiples of 16 bytes and K is a multiple of 8
template <class Q, class T, int kThreads, int kPieces, bool kAligned, Scales kScales, bool kZeros, bool kSmooth>
struct QuantizeActivations {
    static constexpr int kWarps = kThreads / kWarpSize;
    using Range = Extent<T, kAligned, kZeros, kSmooth>;

    static constexpr bool kFinite = kScales != Scales::kTensor;  // scales of its own: no quotient beyond the codes

    static_assert(kPieces % 2 == 0, "two lanes trade halves of two pieces, so that each stores 16 bytes");
    static_assert(!kZeros || kScales != Scales::kBlock, "scales of blocks are symmetric");

    __device__ __forceinline__ static void of_token(Range& extent, const QuantizeArguments& a, float& scale,
                                                    float& zero) {
        __shared__ u32 of_warp[2][kWarps];
        const int thread = static_cast<int>(threadIdx.x);
        extent.up = max_of_lanes<kWarpSize>(extent.up);
        if constexpr (kZeros) extent.down = max_of_lanes<kWarpSize>(extent.down);
        if constexpr (kWarps > 1) {
            if (thread % kWarpSize == 0) {
                of_warp[0][thread / kWarpSize] = extent.up;
                if constexpr (kZeros) of_warp[1][thread / kWarpSize] = extent.down;
            }
            __syncthreads();
#pragma unroll
            for (int i = 0; i < kWarps; ++i) {
                extent.up = max(extent.up, of_warp[0][i]);
                if constexpr (kZeros) extent.down = max(extent.down, of_warp[1][i]);
            }
        }
        if constexpr (kZeros) {
            lopsided(extent.above(), extent.below(), scale, zero);
            if (thread == 0) a.zeros[blockIdx.x] = static_cast<int>(zero);
        } else {
            scale = safe_scale(__fdiv_rn(extent.above(), largest_code(Q())));
            zero = 0.0f;
        }
        if (thread == 0) a.scales[blockIdx.x] = scale;
    }

    // The 16 lanes that hold a block of 128 k agree on its scale; the first writes it.
    __device__ __forceinline__ static float of_block(const Range& extent, const QuantizeArguments& a, int piece) {
        Range whole;
        whole.up = max_of_lanes<16>(extent.up);
        const float scale = safe_scale(__fdiv_rn(whole.above(), largest_code(Q())));
        if (piece % 16 == 0 && piece * 8 < a.k) {
            a.scales[static_cast<long long>(piece / 16) * a.scale_stride + blockIdx.x] = scale;
        }
        return scale;
    }

    __device__ __forceinline__ static uint2 encode(const Vec16& piece, const QuantizeArguments& a, int at, float scale,
                                                   float zero) {
        if constexpr (kScales == Scales::kBlock) {
            Range extent;
            extent.include(piece, a.factor, at, a.k);
            scale = of_block(extent, a, at);
        }
        float v[8];
        piece_values<T, kAligned>(v, piece, kSmooth ? a.factor : nullptr, at, a.k);
        return encode_piece<Q, kFinite>(v, Divider(scale), zero);
    }

    // Codes past K stand for zero, and meet weights of zero.
    __device__ __forceinline__ static void store(u8* codes, int piece, int code_stride, const uint4& v) {
        if (piece * 8 < code_stride) *reinterpret_cast<uint4*>(codes + piece * 8) = v;
    }

    __device__ __forceinline__ static void run(const QuantizeArguments& a) {
        const int thread = static_cast<int>(threadIdx.x);
        const u16* row = a.x + static_cast<long long>(blockIdx.x) * a.row_stride;
        u8* out = a.codes + static_cast<long long>(blockIdx.x) * a.code_stride;

        Vec16 kept[kPieces];
        Range extent;
#pragma unroll
        for (int i = 0; i < kPieces; ++i) kept[i] = load_piece<kAligned>(row, i * kThreads + thread, a.k);
        float scale = 1.0f, zero = 0.0f;
        if constexpr (kScales == Scales::kToken) {
#pragma unroll
            for (int i = 0; i < kPieces; ++i) extent.include(kept[i], a.factor, i * kThreads + thread, a.k);
            for (int piece = kPieces * kThreads + thread; piece * 8 < a.k; piece += kThreads) {
                extent.include(load_piece<kAligned>(row, piece, a.k), a.factor, piece, a.k);
            }
            of_token(extent, a, scale, zero);
        } else if constexpr (kScales == Scales::kTensor) {
            scale = *a.tensor_scale;
            if constexpr (kZeros) zero = static_cast<float>(*a.tensor_zero);
        }

        // All lanes go through the same rounds: they trade with their neighbours.
        const bool odd = thread % 2 != 0;
        const auto put = [&](const Vec16& first, const Vec16& second, int piece) {
            const uint2 low = encode(first, a, piece, scale, zero);
            const uint2 high = encode(second, a, piece + kThreads, scale, zero);
            const uint2 give = odd ? low : high;
            const uint2 got =
                make_uint2(__shfl_xor_sync(0xffffffffu, give.x, 1), __shfl_xor_sync(0xffffffffu, give.y, 1));
            const uint4 v = odd ? make_uint4(got.x, got.y, high.x, high.y) : make_uint4(low.x, low.y, got.x, got.y);
            store(out, odd ? piece + kThreads - 1 : piece, a.code_stride, v);
        };
#pragma unroll
        for (int i = 0; i < kPieces; i += 2) {
            if (i * kThreads * 8 < a.code_stride) put(kept[i], kept[i + 1], i * kThreads + thread);
        }
        for (int base = kPieces * kThreads; base * 8 < a.code_stride; base += 2 * kThreads) {
            const int piece = base + thread;
            put(load_piece<kAligned>(row, piece, a.k), load_piece<kAligned>(row, piece + kThreads, a.k), piece);
        }
    }
};
