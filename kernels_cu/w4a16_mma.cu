// y[M, N] = x[M, K] @ w[K, N] + bias with 4-bit weights, on mma.sync tensor cores (sm_80 and later).
//
// Weights are the A operand: 16 features (a strip) are the 16 rows, tokens are the n8 columns, so a batch of 8 wastes
// nothing. Packed weights are stored in fragment order, one 16-byte load a lane for a unit of 16 features x 64 k.
//
//   CTA tile, kWarpsN = 2, kWarpsK = 2:            one stage of the pipeline:
//
//              k: warp_k 0    warp_k 1                weights  [warp][strip][unit][lane] 16 bytes
//     strips   +-----------+-----------+              scales   [warp][strip][span] 32 bytes
//     warp_n 0 | warp 0    | warp 1    |              zeros    [warp][strip][span] 16 bytes
//              +-----------+-----------+              x        [token][k], 16-byte columns swizzled
//     warp_n 1 | warp 2    | warp 3    |
//              +-----------+-----------+
//
// Each warp reads only weights, scales and zeros that it copied itself; x is shared by the CTA. Warps of one row add
// their sums in the epilogue.
#include "types.cuh"
#include "ptx.cuh"
#include "elements.cuh"
#include "mma.cuh"
#include "activations.cuh"
#include "epilogue.cuh"

// T, S            element types of x and y, and of the scales
// kBlockM         tokens of a CTA tile
// kStrips         strips (16 features) of a warp
// kWarpsN, kWarpsK  warps along the features and along k
// kWarpK          k of a warp in one stage
// kStages         stages of the pipeline
// kGroup          k of a quantization group; 0: one group a column
// kHasZeros       whether groups have zero points (else 8)
// kScaleWeights   scale weights as they are dequantized (rounds to T), or the fp32 sums of each span
// kAligned        rows of x start at multiples of 16 bytes and K is a multiple of 8
// kVector         features stored at once
template <class T, class S, int kBlockM, int kStrips, int kWarpsN, int kWarpsK, int kWarpK, int kStages, int kGroup,
          bool kHasZeros, bool kScaleWeights, bool kAligned, int kVector>
struct W4A16 {
    static constexpr int kWarps = kWarpsN * kWarpsK;
    static constexpr int kThreads = kWarps * kWarpSize;
    static constexpr int kBlockN = kWarpsN * kStrips * 16;
    static constexpr int kBlockK = kWarpsK * kWarpK;
    static constexpr int kUnits = kWarpK / 64;    // units of a strip in a warp's share of a stage
    static constexpr int kSteps = kWarpK / 16;    // mma steps, likewise
    static constexpr int kTokens = kBlockM / 8;   // n8 columns of tokens
    static constexpr bool kPerColumn = kGroup == 0;
    // A span is a run of k with one scale inside a warp's share of a stage.
    static constexpr int kSpan = kPerColumn ? kWarpK : min_of(kGroup, kWarpK);
    static constexpr int kSpans = kWarpK / kSpan;
    static constexpr int kSpanSteps = kSpan / 16;

    static_assert(kBlockM % 8 == 0, "tokens come in columns of 8");
    static_assert(kWarpK % 64 == 0, "a warp walks whole units of 64 k");
    static_assert(kGroup % 16 == 0, "a group holds whole mma steps of 16 k");
    static_assert(kStages >= 2, "one stage is filled while another is read");
    static_assert(!kScaleWeights || !kPerColumn, "a scale a column is applied once, to the finished sum");

    using X = ActivationTile<kThreads, kBlockM, kBlockK * 2, 2, kAligned>;
    using Out = Epilogue<float, T, kThreads, kBlockM, kBlockN, kWarpsK, kVector>;

    static constexpr int kWarpWeightBytes = kStrips * kUnits * 512;
    static constexpr int kWarpScaleBytes = kPerColumn ? 0 : kStrips * kSpans * 32;
    static constexpr int kWarpZeroBytes = kPerColumn || !kHasZeros ? 0 : kStrips * kSpans * 16;
    static constexpr int kWeightsAt = X::kBytes;
    static constexpr int kScalesAt = kWeightsAt + kWarps * kWarpWeightBytes;
    static constexpr int kZerosAt = kScalesAt + kWarps * kWarpScaleBytes;
    // Stages start at multiples of 128 bytes, which the swizzle of x relies on.
    static constexpr int kStageBytes = ceil_div(kZerosAt + kWarps * kWarpZeroBytes, 128) * 128;
    static constexpr int kSharedBytes = max_of(kStages * kStageBytes, Out::kSharedBytes);

    struct Weights {
        const char* strips[kStrips];  // this lane's 16 bytes of unit 0 of each strip
        const char* scales;           // scales of the piece this lane copies, group 0
        const char* zeros;
    };

    // Lanes [0, kStrips * kSpans * pieces) each copy one 16-byte piece of the warp's scales (2 a group) or zeros (1).
    template <int kPiecesPerGroup>
    __device__ __forceinline__ static void copy_groups(u32 shared, const char* base, int strip0, int last_strip,
                                                       int groups, int first_group, int lane) {
        constexpr int kPieces = kStrips * kSpans * kPiecesPerGroup;
#pragma unroll
        for (int i = 0; i < kPieces; i += kWarpSize) {
            const int piece = i + lane;
            if (kPieces - i < kWarpSize && piece >= kPieces) break;
            const int part = piece % kPiecesPerGroup, span = piece / kPiecesPerGroup % kSpans;
            const int strip = min(strip0 + piece / (kPiecesPerGroup * kSpans), last_strip);
            // Past the last group x is zero: any finite scale will do.
            const int group = min(first_group + span, groups - 1);
            const long long row = static_cast<long long>(strip) * groups + group;
            copy_async_16(shared + piece * 16, base + (row * kPiecesPerGroup + part) * 16);
        }
    }

    __device__ __forceinline__ static void run(const char* weights, const char* scales, const char* zeros,
                                               const u16* x, u16* y, const u16* bias, u32* partials, u32* arrivals,
                                               int m, int n, int k, int row_stride, int splits) {
        extern __shared__ __align__(128) char shared_memory[];
        const u32 shared = shared_address(shared_memory);
        const int lane = static_cast<int>(threadIdx.x) % kWarpSize, warp = static_cast<int>(threadIdx.x) / kWarpSize;
        const int warp_n = warp / kWarpsK, warp_k = warp % kWarpsK;

        // Tiles of one strip of weights follow each other, so that they meet in L2.
        const int m_tiles = (m + kBlockM - 1) / kBlockM, n_tiles = (n + kBlockN - 1) / kBlockN;
        const int tile = static_cast<int>(blockIdx.x) % (m_tiles * n_tiles);
        const int split = static_cast<int>(blockIdx.x) / (m_tiles * n_tiles);
        const int m0 = tile % m_tiles * kBlockM, n0 = tile / m_tiles * kBlockN;

        const int units = (k + 63) / 64, groups = kPerColumn ? 1 : (k + kGroup - 1) / kGroup;
        const int last_strip = (n + 15) / 16 - 1, strip0 = n0 / 16 + warp_n * kStrips;
        const int stages = (k + kBlockK - 1) / kBlockK;  // of the whole K
        const int stages_a_split = (stages + splits - 1) / splits;
        const int first = min(split * stages_a_split, stages), last = min(first + stages_a_split, stages);

        const X x_tile(x + static_cast<long long>(m0) * row_stride, m - m0, k, row_stride, threadIdx.x);
        const char* strip_at[kStrips];
#pragma unroll
        for (int s = 0; s < kStrips; ++s) {
            // Strips past N repeat the last one; their results are never stored.
            strip_at[s] = weights + (static_cast<long long>(min(strip0 + s, last_strip)) * units * 32 + lane) * 16;
        }
        const u64 policy = evict_first_policy();

        const auto copy_stage = [&](int stage, int slot) {
            const u32 base = shared + slot * kStageBytes;
            const int k0 = stage * kBlockK;
            x_tile.copy(base, k0);
            const u32 to = base + kWeightsAt + warp * kWarpWeightBytes + lane * 16;
            const int k_warp = k0 + warp_k * kWarpK;
#pragma unroll
            for (int u = 0; u < kUnits; ++u) {
                // Past the last unit x is zero: any weights will do.
                const u32 offset = static_cast<u32>(min(k_warp / 64 + u, units - 1)) * 512u;
#pragma unroll
                for (int s = 0; s < kStrips; ++s) {
                    copy_async_16(to + (s * kUnits + u) * 512, strip_at[s] + offset, policy);
                }
            }
            if constexpr (!kPerColumn) {
                const int group = k_warp / kGroup;
                copy_groups<2>(base + kScalesAt + warp * kWarpScaleBytes, scales, strip0, last_strip, groups, group,
                               lane);
                if constexpr (kHasZeros) {
                    copy_groups<1>(base + kZerosAt + warp * kWarpZeroBytes, zeros, strip0, last_strip, groups, group,
                                   lane);
                }
            }
        };

        float sums[kStrips][kTokens][4];
        ZeroPair zero[kStrips];
#pragma unroll
        for (int s = 0; s < kStrips; ++s) {
#pragma unroll
            for (int j = 0; j < kTokens; ++j) sums[s][j][0] = sums[s][j][1] = sums[s][j][2] = sums[s][j][3] = 0.0f;
            zero[s] = T::symmetric_zero();
            if constexpr (kPerColumn && kHasZeros) {
                const int strip = min(strip0 + s, last_strip);
                zero[s] = T::zero_pair(reinterpret_cast<const u16*>(zeros)[strip * 8 + lane / 4]);
            }
        }

#pragma unroll
        for (int i = 0; i < kStages - 1; ++i) {
            if (first + i < last) copy_stage(first + i, i);
            copy_async_commit();
        }

        const u32 x_lane[2] = {X::lane_offset(lane, 0), X::lane_offset(lane, 1)};
        int slot = 0, free_slot = kStages - 1;
        for (int stage = first; stage < last; ++stage) {
            copy_async_wait<kStages - 2>();
            __syncthreads();  // this stage is there for all; all have left the slot that is filled next
            if (stage + kStages - 1 < last) copy_stage(stage + kStages - 1, free_slot);
            copy_async_commit();

            const u32 base = shared + slot * kStageBytes;
            const u32 weights_at = base + kWeightsAt + warp * kWarpWeightBytes + lane * 16;
            const u32 scales_at = base + kScalesAt + warp * kWarpScaleBytes + lane / 4 * 4;
            const u32 zeros_at = base + kZerosAt + warp * kWarpZeroBytes + lane / 4 * 2;
            const u32 x_at[2] = {base + x_lane[0] + warp_k * kWarpK * 2, base + x_lane[1] + warp_k * kWarpK * 2};

            compute(sums, zero, weights_at, scales_at, zeros_at, x_at);
            slot = slot + 1 == kStages ? 0 : slot + 1;
            free_slot = free_slot + 1 == kStages ? 0 : free_slot + 1;
        }
        copy_async_wait<0>();
        __syncthreads();  // the pipeline's memory becomes the epilogue's

        u32* tile_sums = reinterpret_cast<u32*>(shared_memory);
#pragma unroll
        for (int s = 0; s < kStrips; ++s) {
            if constexpr (kPerColumn) {
                const int strip = min(strip0 + s, last_strip);
                float low, high;
                scales_to_float<S>(reinterpret_cast<const u32*>(scales)[strip * 8 + lane / 4], low, high);
#pragma unroll
                for (int j = 0; j < kTokens; ++j) {
                    sums[s][j][0] *= low;
                    sums[s][j][1] *= low;
                    sums[s][j][2] *= high;
                    sums[s][j][3] *= high;
                }
            }
#pragma unroll
            for (int j = 0; j < kTokens; ++j) {
                Out::put(tile_sums, warp_k, (warp_n * kStrips + s) * 16, j * 8, lane, sums[s][j]);
            }
        }
        Out::run(tile_sums, y, bias, partials, arrivals, tile, split, splits, m0, n0, m, n,
                 [](int, int, float sum) { return sum; });
    }

    // One stage of one warp.
    __device__ __forceinline__ static void compute(float (&sums)[kStrips][kTokens][4], ZeroPair (&zero)[kStrips],
                                                   u32 weights_at, u32 scales_at, u32 zeros_at,
                                                   const u32 (&x_at)[2]) {
        constexpr bool kSpanSums = !kPerColumn && !kScaleWeights;
        float span_sums[kStrips][kTokens][4];
        u32 scale[kStrips];
        u32 row_scale[kStrips][2];
        Vec16 packed[kStrips];
        u32 b[kTokens][4];
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            if (step % 4 == 0) {
#pragma unroll
                for (int s = 0; s < kStrips; ++s) packed[s] = load_shared_16(weights_at + (s * kUnits + step / 4) * 512);
            }
            if (step % 2 == 0) {
#pragma unroll
                for (int j = 0; j < kTokens; ++j) {
                    load_matrix_x4(b[j], x_at[step / 2 % 2] + X::fragment_offset(j, step / 2));
                }
            }
            if (!kPerColumn && step % kSpanSteps == 0) {
#pragma unroll
                for (int s = 0; s < kStrips; ++s) {
                    const int span = s * kSpans + step / kSpanSteps;
                    scale[s] = load_shared_4(scales_at + span * 32);
                    if constexpr (kHasZeros) zero[s] = T::zero_pair(load_shared_2(zeros_at + span * 16));
                    if constexpr (kScaleWeights) {
                        row_scale[s][0] = permute_bytes(scale[s], scale[s], 0x1010);
                        row_scale[s][1] = permute_bytes(scale[s], scale[s], 0x3232);
                    } else {
#pragma unroll
                        for (int j = 0; j < kTokens; ++j) {
                            span_sums[s][j][0] = span_sums[s][j][1] = span_sums[s][j][2] = span_sums[s][j][3] = 0.0f;
                        }
                    }
                }
            }
#pragma unroll
            for (int s = 0; s < kStrips; ++s) {
                u32 a[4];
                T::dequantize(a, packed[s].w[step % 4], zero[s]);
                if constexpr (kScaleWeights) {
#pragma unroll
                    for (int r = 0; r < 4; ++r) a[r] = T::mul2(a[r], row_scale[s][r & 1]);
                }
#pragma unroll
                for (int j = 0; j < kTokens; ++j) {
                    Mma<T>::run(kSpanSums ? span_sums[s][j] : sums[s][j], a, b[j][step % 2 * 2],
                                b[j][step % 2 * 2 + 1]);
                }
            }
            if (kSpanSums && (step + 1) % kSpanSteps == 0) {
#pragma unroll
                for (int s = 0; s < kStrips; ++s) {
                    float low, high;
                    scales_to_float<S>(scale[s], low, high);
#pragma unroll
                    for (int j = 0; j < kTokens; ++j) {
                        sums[s][j][0] += span_sums[s][j][0] * low;
                        sums[s][j][1] += span_sums[s][j][1] * low;
                        sums[s][j][2] += span_sums[s][j][2] * high;
                        sums[s][j][3] += span_sums[s][j][3] * high;
                    }
                }
            }
        }
    }
};
