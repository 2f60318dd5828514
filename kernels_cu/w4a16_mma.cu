// y[M, N] = x[M, K] @ w[K, N] + bias with 2-, 4- or 8-bit weights, on mma.sync tensor cores (sm_75 and later).
//
// Weights are the A operand: 16 features (a strip) are the 16 rows, tokens are the n8 columns, so a batch of 8 wastes
// nothing. Packed weights are stored in fragment order, one 16-byte load a lane for a unit of 16 features x 128, 64 or
// 32 k.
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
#include "codes.cuh"
#include "mma.cuh"
#include "activations.cuh"
#include "epilogue.cuh"
#include "stripes.cuh"

// T, S            element types of x and y, and of the scales
// kBits           bits of a weight: 2, 4, 8
// kBlockM         tokens of a CTA tile
// kStrips         strips (16 features) of a warp
// kWarpsN, kWarpsK  warps along the features and along k
// kWarpK          k of a warp in one stage
// kStages         stages of the pipeline
// kGroup          k of a quantization group; 0: one group a column
// kHasZeros       whether groups have zero points (else half of the codes)
// kScaleWeights   scale weights as they are dequantized (rounds to T), or the fp32 sums of each span
// kAligned        rows of x start at multiples of 16 bytes and K is a multiple of 8
// kWhole          K is a multiple of the k of a stage
// kStriped        a CTA may work on several tiles (stripes.cuh)
// kVector         features stored at once
template <class T, class S, int kBits, int kBlockM, int kStrips, int kWarpsN, int kWarpsK, int kWarpK, int kStages,
          int kGroup, bool kHasZeros, bool kScaleWeights, bool kAligned, bool kWhole, bool kStriped, int kVector>
struct W4A16 {
    using Code = Codes<T, kBits>;
    using Zero = typename Code::Zero;
    static constexpr int kWarps = kWarpsN * kWarpsK;
    static constexpr int kThreads = kWarps * kWarpSize;
    static constexpr int kBlockN = kWarpsN * kStrips * 16;
    static constexpr int kBlockK = kWarpsK * kWarpK;
    static constexpr int kUnitK = Code::kUnitK;
    static constexpr int kUnits = kWarpK / kUnitK;  // units of a strip in a warp's share of a stage
    static constexpr int kUnitSteps = kUnitK / 16;
    static constexpr int kSteps = kWarpK / 16;   // mma steps, likewise
    static constexpr int kTokens = kBlockM / 8;  // n8 columns of tokens
    static constexpr bool kPerColumn = kGroup == 0;
    // A span is a run of k with one scale inside a warp's share of a stage.
    static constexpr int kSpan = kPerColumn ? kWarpK : min_of(kGroup, kWarpK);
    static constexpr int kSpans = kWarpK / kSpan;
    static constexpr int kSpanSteps = kSpan / 16;

    static_assert(kBlockM % 8 == 0, "tokens come in columns of 8");
    static_assert(kWarpK % kUnitK == 0 && kWarpK % 64 == 0, "a warp walks whole units, and whole rows of activations");
    static_assert(kGroup % 16 == 0, "a group holds whole mma steps of 16 k");
    static_assert(kStages >= 2, "one stage is filled while another is read");
    static_assert(!kScaleWeights || !kPerColumn, "a scale a column is applied once, to the finished sum");

    using X = ActivationTile<kThreads, kBlockM, kBlockK * 2, 2, kAligned, kWhole>;
    using Fragments = typename X::template Fragments<kTokens>;
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

    // This lane's 16 bytes of each strip's units, stage after stage.
    struct Weights {
        const char* strips[kStrips];
        int unit, last_unit;
        Copy16 pieces[kStrips * kUnits];

        __device__ __forceinline__ Weights(const char* weights, int strip0, int last_strip, int units, int unit0,
                                           int lane)
            : unit(unit0), last_unit(units - 1) {
#pragma unroll
            for (int s = 0; s < kStrips; ++s) {
                // Strips past N repeat the last one; their results are never stored.
                const long long at = static_cast<long long>(min(strip0 + s, last_strip)) * units + (kWhole ? unit0 : 0);
                strips[s] = weights + (at * kWarpSize + lane) * 16;
            }
        }

        __device__ __forceinline__ void fetch(u32 shared, u64 policy) {
            for_each<kStrips * kUnits>([&](auto index) {
                constexpr int kIndex = decltype(index)::value, s = kIndex / kUnits, u = kIndex % kUnits;
                if constexpr (kWhole) {
                    pieces[kIndex].template fetch<kIndex * 512, u * 512>(shared, strips[s], policy);
                } else {  // past the last unit x is zero: any weights will do
                    pieces[kIndex].template fetch<kIndex * 512>(shared, strips[s] + min(unit + u, last_unit) * 512,
                                                                policy);
                }
            });
#pragma unroll
            for (int s = 0; s < kStrips; ++s) strips[s] += kWhole ? kBlockK / kUnitK * 512 : 0;
            unit += kBlockK / kUnitK;
        }

        __device__ __forceinline__ void land(u32 shared) const {
#pragma unroll
            for (int i = 0; i < kStrips * kUnits; ++i) pieces[i].land(shared + i * 512);
        }
    };

    // Scales (two 16-byte pieces a group) or zero points (one) of the warp's strips, a piece a lane, stage after stage.
    template <int kPiecesPerGroup>
    struct Groups {
        static constexpr int kPieces = kStrips * kSpans * kPiecesPerGroup;
        static constexpr int kPasses = ceil_div(kPieces, kWarpSize);
        static constexpr int kGroupBytes = kPiecesPerGroup * 16;
        // A stage holds whole groups, all of them: pointers step by a constant.
        static constexpr bool kSteps = kWhole && kBlockK % max_of(kGroup, 1) == 0;

        const char* from[kPasses];
        int span[kPasses];
        Copy16 copies[kPasses];
        int k_warp, last_group;

        __device__ __forceinline__ Groups(const char* base, int strip0, int last_strip, int groups, int k0, int lane)
            : k_warp(k0), last_group(groups - 1) {
#pragma unroll
            for (int i = 0; i < kPasses; ++i) {
                const int piece = i * kWarpSize + lane, part = piece % kPiecesPerGroup;
                const int strip = min(strip0 + piece / (kPiecesPerGroup * kSpans), last_strip);
                span[i] = piece / kPiecesPerGroup % kSpans;
                const int group = kSteps ? k0 / max_of(kGroup, 1) + span[i] : 0;
                from[i] = base + (static_cast<long long>(strip) * groups + group) * kGroupBytes + part * 16;
            }
        }

        __device__ __forceinline__ static bool idle(int pass, int lane) {
            return kPieces % kWarpSize != 0 && pass * kWarpSize + lane >= kPieces;
        }

        __device__ __forceinline__ void fetch(u32 shared, int lane) {
#pragma unroll
            for (int i = 0; i < kPasses; ++i) {
                if (idle(i, lane)) break;
                const u32 to = shared + (i * kWarpSize + lane) * 16;
                if constexpr (kSteps) {
                    copies[i].fetch(to, from[i]);
                    from[i] += kBlockK / max_of(kGroup, 1) * kGroupBytes;
                } else {
                    // Past the last group x is zero: any finite scale will do.
                    const int group =
                        min(static_cast<int>(static_cast<u32>(k_warp) / max_of(kGroup, 1)) + span[i], last_group);
                    copies[i].fetch(to, from[i] + group * kGroupBytes);
                }
            }
            k_warp += kBlockK;
        }

        __device__ __forceinline__ void land(u32 shared, int lane) const {
#pragma unroll
            for (int i = 0; i < kPasses; ++i) {
                if (idle(i, lane)) break;
                copies[i].land(shared + (i * kWarpSize + lane) * 16);
            }
        }
    };

    // The arguments of a launch.
    struct Arguments {
        const char *weights, *scales, *zeros;
        const u16* x;
        u16* y;
        const u16* bias;
        u32 *partials, *arrivals;
        int m, n, k, row_stride;
        Stripes stripes;
    };

    __device__ __forceinline__ static void run(const Arguments& p) {
        const int tile_stages = (p.k + kBlockK - 1) / kBlockK;
        const int cta = static_cast<int>(blockIdx.x), ctas = static_cast<int>(gridDim.x);
        const int begin = p.stripes.start(cta), end = p.stripes.start(cta + 1);
        int at = begin;
        do {
            const int tile = at / tile_stages, first = at % tile_stages;
            const int last = min(tile_stages, first + end - at);
            // Tiles of one strip of weights follow each other, so that they meet in L2.
            const int m_tiles = (p.m + kBlockM - 1) / kBlockM;
            const int m0 = tile % m_tiles * kBlockM, n0 = tile / m_tiles * kBlockN;
            u32* sums = accumulate(p, m0, n0, first, last);
            const auto scale = [](int, int, float sum) { return sum; };
            if (last - first == tile_stages) {
                Out::finish(sums, p.y, p.bias, m0, n0, p.m, p.n, scale);
            } else {
                const int tile_begin = tile * tile_stages;
                const int first_cta = p.stripes.cta_of(tile_begin);
                const int count = p.stripes.cta_of(tile_begin + tile_stages - 1) - first_cta + 1;
                // A CTA that began before the tile keeps this part behind those of all CTAs' first tiles.
                const auto slot = [&](int part) {
                    const int owner = first_cta + part;
                    return static_cast<long long>(owner) + (p.stripes.start(owner) < tile_begin ? ctas : 0);
                };
                Out::combine(sums, p.y, p.bias, p.partials, p.arrivals + tile, cta - first_cta, count, slot, m0, n0,
                             p.m, p.n, scale);
            }
            at += last - first;
        } while (kStriped && at < end);
    }

    // Adds up stages [first, last) of one tile and leaves the sums of its warps in shared memory.
    __device__ __forceinline__ static u32* accumulate(const Arguments& p, int m0, int n0, int first, int last) {
        extern __shared__ __align__(128) char shared_memory[];
        const u32 shared = shared_address(shared_memory);
        const int lane = static_cast<int>(threadIdx.x) % kWarpSize, warp = static_cast<int>(threadIdx.x) / kWarpSize;
        const int warp_n = warp / kWarpsK, warp_k = warp % kWarpsK;

        const int units = (p.k + kUnitK - 1) / kUnitK;
        const int groups = kPerColumn ? 1 : (p.k + kGroup - 1) / max_of(kGroup, 1);
        const int last_strip = (p.n + 15) / 16 - 1, strip0 = n0 / 16 + warp_n * kStrips;
        const int k0 = first * kBlockK, k_warp = k0 + warp_k * kWarpK;

        X x_tile(p.x + static_cast<long long>(m0) * p.row_stride, p.m - m0, p.k, k0, p.row_stride);
        Weights weight_units(p.weights, strip0, last_strip, units, k_warp / kUnitK, lane);
        Groups<2> scale_groups(p.scales, strip0, last_strip, groups, k_warp, lane);
        Groups<1> zero_groups(p.zeros, strip0, last_strip, groups, k_warp, lane);
        const u64 policy = evict_first_policy();

        const u32 weights_to = kWeightsAt + warp * kWarpWeightBytes + lane * 16;
        const u32 scales_to = kScalesAt + warp * kWarpScaleBytes, zeros_to = kZerosAt + warp * kWarpZeroBytes;
        const auto fetch_stage = [&](u32 slot) {  // the next stage, to the slot at this offset
            x_tile.fetch(shared + slot);
            weight_units.fetch(shared + slot + weights_to, policy);
            if constexpr (!kPerColumn) {
                scale_groups.fetch(shared + slot + scales_to, lane);
                if constexpr (kHasZeros) zero_groups.fetch(shared + slot + zeros_to, lane);
            }
        };
        const auto land_stage = [&](u32 slot) {
            x_tile.land(shared + slot);
            weight_units.land(shared + slot + weights_to);
            if constexpr (!kPerColumn) {
                scale_groups.land(shared + slot + scales_to, lane);
                if constexpr (kHasZeros) zero_groups.land(shared + slot + zeros_to, lane);
            }
        };

        float sums[kStrips][kTokens][4];
        Zero zero[kStrips];
#pragma unroll
        for (int s = 0; s < kStrips; ++s) {
#pragma unroll
            for (int j = 0; j < kTokens; ++j) sums[s][j][0] = sums[s][j][1] = sums[s][j][2] = sums[s][j][3] = 0.0f;
            zero[s] = Code::symmetric();
            if constexpr (kPerColumn && kHasZeros) {
                const int strip = min(strip0 + s, last_strip);
                zero[s] = Code::zero(reinterpret_cast<const u16*>(p.zeros)[strip * 8 + lane / 4]);
            }
        }

#pragma unroll
        for (int i = 0; i < kStages - 1; ++i) {
            if (first + i < last) {
                fetch_stage(i * kStageBytes);
                land_stage(i * kStageBytes);
            }
            copy_async_commit();
        }

        const u32 x_lane = Fragments::lane_address(lane, 0);
        u32 slot = 0, free_slot = (kStages - 1) * kStageBytes;
        for (int stage = first; stage < last; ++stage) {
            copy_async_wait<kStages - 2>();
            __syncthreads();  // this stage is there for all; all have left the slot that is filled next
            const bool more = stage + kStages - 1 < last;
            if (more) fetch_stage(free_slot);
            copy_async_commit();

            const char* at = shared_memory + slot;
            compute(sums, zero, at + weights_to, at + scales_to + lane / 4 * 4, at + zeros_to + lane / 4 * 2,
                    Fragments(shared + slot, x_lane, warp_k * kSteps));
            if (!kHasCopyAsync && more) land_stage(free_slot);
            free_slot = slot;
            slot = slot == (kStages - 1) * kStageBytes ? 0 : slot + kStageBytes;
        }
        copy_async_wait<0>();
        __syncthreads();  // the pipeline's memory becomes the epilogue's

        u32* tile_sums = reinterpret_cast<u32*>(shared_memory);
#pragma unroll
        for (int s = 0; s < kStrips; ++s) {
            if constexpr (kPerColumn) {
                const int strip = min(strip0 + s, last_strip);
                float low, high;
                scales_to_float<S>(reinterpret_cast<const u32*>(p.scales)[strip * 8 + lane / 4], low, high);
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
        return tile_sums;
    }

    // One stage of one warp.
    __device__ __forceinline__ static void compute(float (&sums)[kStrips][kTokens][4], Zero (&zero)[kStrips],
                                                   const char* weights, const char* scales, const char* zeros,
                                                   Fragments x) {
        constexpr bool kSpanSums = !kPerColumn && !kScaleWeights;
        float span_sums[kStrips][kTokens][4];
        u32 scale[kStrips];
        u32 row_scale[kStrips][2];
        uint4 packed[kStrips];
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            if (step % kUnitSteps == 0) {
#pragma unroll
                for (int s = 0; s < kStrips; ++s) {
                    packed[s] = *reinterpret_cast<const uint4*>(weights + (s * kUnits + step / kUnitSteps) * 512);
                }
            }
            x.load(step);
            if (!kPerColumn && step % kSpanSteps == 0) {
#pragma unroll
                for (int s = 0; s < kStrips; ++s) {
                    const int span = s * kSpans + step / kSpanSteps;
                    scale[s] = *reinterpret_cast<const u32*>(scales + span * 32);
                    if constexpr (kHasZeros) zero[s] = Code::zero(*reinterpret_cast<const u16*>(zeros + span * 16));
                    if constexpr (kScaleWeights) {
                        row_scale[s][0] = permute_bytes(scale[s], scale[s], 0x1010);
                        row_scale[s][1] = permute_bytes(scale[s], scale[s], 0x3232);
                    }
                }
            }
#pragma unroll
            for (int s = 0; s < kStrips; ++s) {
                u32 a[4];
                Code::fragment(a, packed[s], step % kUnitSteps, zero[s]);
                if constexpr (kScaleWeights) {
#pragma unroll
                    for (int r = 0; r < 4; ++r) a[r] = T::mul2(a[r], row_scale[s][r & 1]);
                }
#pragma unroll
                for (int j = 0; j < kTokens; ++j) {
                    if (kSpanSums && step % kSpanSteps == 0) {
                        Mma<T>::start(span_sums[s][j], a, x.low(j, step), x.high(j, step));
                    } else {
                        Mma<T>::run(kSpanSums ? span_sums[s][j] : sums[s][j], a, x.low(j, step), x.high(j, step));
                    }
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
