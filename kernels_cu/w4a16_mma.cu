// y[M, N] = x[M, K] @ w[K, N] + bias with 2-, 4- or 8-bit weights, on mma.sync tensor cores (sm_75 and later).
//
// Weights are the A operand: 16 features (a strip) are the 16 rows, tokens are the n8 columns, so a batch of 8 wastes
// nothing. Packed weights are stored in fragment order, one 16-byte load a lane for a unit of 16 features x 128, 64 or
// 32 k.
//
//   CTA tile, kWarpsN = 2, kWarpsK = 2:            one stage of the pipeline:
//
//              k: warp_k 0    warp_k 1                weights  [warp][strip][unit][lane] 16 bytes
//     strips   +-----------+-----------+              scales   [warp][strip][span] 32 bytes, behind them
//     warp_n 0 | warp 0    | warp 1    |              zeros    [warp][strip][span] 16 bytes
//              +-----------+-----------+              x        [token][k], 16-byte columns swizzled
//     warp_n 1 | warp 2    | warp 3    |
//              +-----------+-----------+
//
// Each warp copies its own weights, scales and zeros; x is shared by the CTA. Warps of one row add
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
    static constexpr bool kSpanSums = !kPerColumn && !kScaleWeights;

    static_assert(kBlockM % 8 == 0, "tokens come in columns of 8");
    static_assert(kWarpK % kUnitK == 0 && kWarpK % 64 == 0, "a warp walks whole units, and whole rows of activations");
    static_assert(kGroup % 16 == 0, "a group holds whole mma steps of 16 k");
    static_assert(kStages >= 2, "one stage is filled while another is read");
    static_assert(!kScaleWeights || !kPerColumn, "a scale a column is applied once, to the finished sum");

    using X = ActivationTile<kThreads, kBlockM, kBlockK * 2, 2, kAligned, kWhole>;
    using Fragments = typename X::template Fragments<kTokens>;
    using Out = Epilogue<float, T, kThreads, kBlockM, kBlockN, kWarpsK, kStrips, kTokens, kVector>;
    using Sums = typename Out::Fragments;  // [strip * kTokens + column of tokens]

    static constexpr int kWarpWeightBytes = kStrips * kUnits * 512;
    static constexpr int kWarpScaleBytes = kPerColumn ? 0 : kStrips * kSpans * 32;
    static constexpr int kWarpGroupBytes = kWarpScaleBytes + (kPerColumn || !kHasZeros ? 0 : kStrips * kSpans * 16);
    static constexpr int kWeightsAt = X::kBytes;
    static constexpr int kGroupsAt = kWeightsAt + kWarps * kWarpWeightBytes;
    // Stages start at multiples of 128 bytes, which the swizzle of x relies on.
    static constexpr int kStageBytes = ceil_div(kGroupsAt + kWarps * kWarpGroupBytes, 128) * 128;
    static constexpr int kSharedBytes = max_of(kStages * kStageBytes, Out::kSharedBytes);

    // What a lane copies of the warp's weights, stage after stage: 16-byte pieces of one strip, so that one pointer does.
    // The lanes of a strip are neighbours and copy whole sectors.
    struct Weights {
        static constexpr int kLanes = kWarpSize / kStrips;  // that share a strip; they copy kRun bytes at once
        static constexpr int kRun = kLanes * 16, kRunsPerUnit = 512 / kRun, kPieces = kUnits * kRunsPerUnit;

        const char* from;
        u32 to;  // offset in the warp's weights of a stage
        u32 unit, last_unit;
        Copy16 pieces[kPieces];

        __device__ __forceinline__ Weights(const char* weights, u32 strip0, u32 last_strip, u32 units, u32 unit0,
                                           u32 lane)
            : to(lane / kLanes * (kUnits * 512) + lane % kLanes * 16), unit(unit0), last_unit(units - 1) {
            // Strips past N repeat the last one; their results are never stored.
            const char* piece = at_row(at_row(weights, lane % kLanes, 16), kWhole ? unit0 : 0, 512);
            from = at_row(piece, min(strip0 + lane / kLanes, last_strip), units * 512);
        }

        __device__ __forceinline__ void fetch(u32 shared, u64 policy) {
            for_each<kPieces>([&](auto index) {
                constexpr int kPiece = decltype(index)::value, kAt = kPiece * kRun;
                if constexpr (kWhole) {
                    pieces[kPiece].template fetch<kAt, kAt>(shared, from, policy);
                } else {  // past the last unit x is zero: any weights will do
                    const char* unit_from = at_row(from, min(unit + kAt / 512, last_unit), 512);
                    pieces[kPiece].template fetch<kAt, kAt % 512>(shared, unit_from, policy);
                }
            });
            from += kWhole ? kBlockK / kUnitK * 512 : 0;
            unit += kBlockK / kUnitK;
        }

        __device__ __forceinline__ void land(u32 shared) const {
#pragma unroll
            for (int i = 0; i < kPieces; ++i) pieces[i].land(shared + i * kRun);
        }
    };

    // Scales (two 16-byte pieces a strip and span) and behind them zero points (one), a piece a lane, stage after stage.
    struct Groups {
        static constexpr int kScales = kStrips * kSpans * 2;
        static constexpr int kPieces = kScales + (kHasZeros ? kStrips * kSpans : 0);
        static constexpr int kPasses = ceil_div(kPieces, kWarpSize);
        // A stage holds whole groups, all of them: pointers step by a constant.
        static constexpr bool kSteps = kWhole && kBlockK % max_of(kGroup, 1) == 0;
        static constexpr int kStepGroups = kBlockK / max_of(kGroup, 1);

        const char* from[kPasses];
        u32 bytes[kPasses];  // of a group
        u32 span[kPasses];
        Copy16 copies[kPasses];
        u32 k_warp, last_group;

        __device__ __forceinline__ Groups(const char* scales, const char* zeros, u32 strip0, u32 last_strip, u32 groups,
                                          u32 k0, u32 lane)
            : k_warp(k0), last_group(groups - 1) {
#pragma unroll
            for (int i = 0; i < kPasses; ++i) {
                const u32 piece = i * kWarpSize + lane;
                const bool zero = kHasZeros && i * kWarpSize + kWarpSize > kScales && piece >= kScales;
                const u32 place = zero ? piece - kScales : piece / 2, part = zero ? 0 : piece % 2;
                bytes[i] = zero ? 16 : 32;
                span[i] = place % kSpans;
                const u32 group = kSteps ? k0 / max_of(kGroup, 1) + span[i] : 0;
                const char* first = at_row(at_row(zero ? zeros : scales, part, 16), group, bytes[i]);
                from[i] = at_row(first, min(strip0 + place / kSpans, last_strip), groups * bytes[i]);
            }
        }

        __device__ __forceinline__ static bool idle(int pass, u32 lane) {
            return kPieces % kWarpSize != 0 && pass * kWarpSize + lane >= kPieces;
        }

        __device__ __forceinline__ void fetch(u32 shared, u32 lane) {
#pragma unroll
            for (int i = 0; i < kPasses; ++i) {
                if (idle(i, lane)) break;
                const u32 to = shared + i * kWarpSize * 16;
                if constexpr (kSteps) {
                    copies[i].fetch(to, from[i]);
                    from[i] = at_row(from[i], bytes[i], kStepGroups);
                } else {
                    // Past the last group x is zero: any finite scale will do.
                    const u32 group = min(k_warp / max_of(kGroup, 1) + span[i], last_group);
                    copies[i].fetch(to, at_row(from[i], group, bytes[i]));
                }
            }
            k_warp += kBlockK;
        }

        __device__ __forceinline__ void land(u32 shared, u32 lane) const {
#pragma unroll
            for (int i = 0; i < kPasses; ++i) {
                if (idle(i, lane)) break;
                copies[i].land(shared + i * kWarpSize * 16);
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
        extern __shared__ __align__(128) char shared[];
        Sums sums;
        if constexpr (kStriped) {
            u32 at = p.stripes.start(blockIdx.x);
            const u32 end = p.stripes.start(blockIdx.x + 1);
            do {
                {
                    const Part part(p, at, end);
                    accumulate(sums, p, shared, part.tile, at - part.begin, part.last - part.begin);
                }
                // Computed again, so that it takes no registers from the main loop.
                const Part part(p, kept(at), end);
                if (part.last - at == part.stages) {
                    Out::finish(shared, sums, place(), target_of(p, part.tile));
                } else {
                    const u32 cta = p.stripes.rank_of(part.begin);
                    const u32 count = p.stripes.rank_of(part.begin + part.stages - 1) - cta + 1;
                    // A CTA that began before the tile keeps this part behind those of all CTAs' first tiles.
                    const u32 first = cta + (p.stripes.start(cta) < part.begin ? gridDim.x : 0);
                    Out::combine(shared, sums, place(), p.partials, p.arrivals + part.tile, blockIdx.x - cta, count,
                                 first, cta, target_of(p, part.tile));
                }
                at = part.last;
            } while (at < end);
        } else {
            const u32 splits = p.stripes.ctas, split = blockIdx.x % splits;
            accumulate(sums, p, shared, blockIdx.x / splits, p.stripes.start(split), p.stripes.start(split + 1));
            const u32 tile = kept(blockIdx.x) / splits;
            Out::run(shared, sums, place(), p.partials, p.arrivals, tile, blockIdx.x - tile * splits, splits,
                     target_of(p, tile));
        }
    }

    // What a CTA with the stages [at, end) of all tiles computes next: of `tile`, whose stages begin with `begin`, those
    // from `at` to `last` - 1.
    struct Part {
        u32 stages, tile, begin, last;  // stages: of a tile

        __device__ __forceinline__ Part(const Arguments& p, u32 at, u32 end) {
            stages = (p.k + kBlockK - 1u) / kBlockK;
            tile = at / stages;
            begin = tile * stages;
            last = min(end, begin + stages);
        }
    };

    // First token and feature of a tile. Those with the same weights follow each other, so that they meet in L2.
    struct Corner {
        u32 m0, n0;

        __device__ __forceinline__ Corner(const Arguments& p, u32 tile) {
            const u32 m_tiles = (p.m + kBlockM - 1u) / kBlockM;
            m0 = tile % m_tiles * kBlockM;
            n0 = tile / m_tiles * kBlockN;
        }
    };

    __device__ __forceinline__ static typename Out::Place place() {
        const u32 thread = kept(threadIdx.x), warp = thread / kWarpSize;
        return {thread % kWarpSize, warp, warp % kWarpsK, warp / kWarpsK * (kStrips * 16), 0};
    }

    struct SumIsValue {  // scales have been applied
        __device__ __forceinline__ float operator()(int, int, float sum) const { return sum; }
    };

    __device__ __forceinline__ static typename Out::template Target<SumIsValue> target_of(const Arguments& p,
                                                                                          u32 tile) {
        const Corner corner(p, tile);
        return {p.y, p.bias, static_cast<int>(corner.m0), static_cast<int>(corner.n0), p.m, p.n, {}};
    }

    // Adds up stages [first, last) of a tile, at least one.
    __device__ __forceinline__ static void accumulate(Sums& sums, const Arguments& p, char* shared_memory, u32 tile,
                                                      u32 first, u32 last) {
        const u32 shared = shared_address(shared_memory);
        const u32 lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
        const u32 warp_n = warp / kWarpsK, warp_k = warp % kWarpsK;
        const u32 m0 = Corner(p, tile).m0, n0 = Corner(p, tile).n0;

        const u32 units = (p.k + kUnitK - 1u) / kUnitK;
        const u32 groups = kPerColumn ? 1 : (p.k + kGroup - 1u) / max_of(kGroup, 1);
        const u32 last_strip = (p.n + 15u) / 16 - 1, strip0 = n0 / 16 + warp_n * kStrips;
        const u32 k0 = first * kBlockK, k_warp = k0 + warp_k * kWarpK;

        X x_tile(at_row(reinterpret_cast<const char*>(p.x), m0, u32(p.row_stride) * 2), p.m - m0, p.k, k0,
                 p.row_stride);
        Weights weight_units(p.weights, strip0, last_strip, units, k_warp / kUnitK, lane);
        Groups group_values(p.scales, p.zeros, strip0, last_strip, groups, k_warp, lane);
        const u64 policy = evict_first_policy();

        // Offsets in a stage of what the lane copies and of what it reads: its fragments, and the scales of its two rows.
        const u32 weights_to = kept(kWeightsAt + warp * kWarpWeightBytes + weight_units.to);
        const u32 weights_at = kept(kWeightsAt + warp * kWarpWeightBytes + lane * 16);
        const u32 groups_at = kGroupsAt + warp * kWarpGroupBytes, groups_to = kept(groups_at + lane * 16);
        const u32 scales_at = kept(groups_at + lane / 4 * 4),
                  zeros_at = kept(groups_at + kWarpScaleBytes + lane / 4 * 2);
        const auto fetch_stage = [&](u32 slot) {  // the next stage, to the slot at this offset
            x_tile.fetch(shared + slot);
            weight_units.fetch(shared + slot + weights_to, policy);
            if constexpr (!kPerColumn) group_values.fetch(shared + slot + groups_to, lane);
        };
        const auto land_stage = [&](u32 slot) {
            x_tile.land(shared + slot);
            weight_units.land(shared + slot + weights_to);
            if constexpr (!kPerColumn) group_values.land(shared + slot + groups_to, lane);
        };

#pragma unroll
        for (int f = 0; f < Out::kFragments; ++f) clear<T>(sums[f]);
        Zero zero[kStrips];
#pragma unroll
        for (int s = 0; s < kStrips; ++s) {
            zero[s] = Code::symmetric();
            if constexpr (kPerColumn && kHasZeros) {
                const u32 strip = min(strip0 + s, last_strip);
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

        const u32 x_at = kept(shared + Fragments::lane_address(lane, 0) + warp_k * (kWarpK * 2));
        u32 slot = 0, free_slot = (kStages - 1) * kStageBytes;
        u32 stage = first;
        do {
            copy_async_wait<kStages - 2>();
            __syncthreads();  // this stage is there for all; all have left the slot that is filled next
            const bool more = stage + kStages - 1 < last;
            if (more) fetch_stage(free_slot);
            copy_async_commit();

            const char* at = shared_memory + slot;
            compute(sums, zero, at + weights_at, at + scales_at, at + zeros_at, Fragments(slot, x_at, 0));
            if (!kHasCopyAsync && more) land_stage(free_slot);
            free_slot = slot;
            slot = slot == (kStages - 1) * kStageBytes ? 0 : slot + kStageBytes;
        } while (++stage < last);
        copy_async_wait<0>();
        __syncthreads();  // the pipeline's memory becomes the epilogue's

        if constexpr (kPerColumn) {
#pragma unroll
            for (int s = 0; s < kStrips; ++s) {
                const u32 strip = min(strip0 + s, last_strip);
                float low, high;
                scales_to_float<S>(reinterpret_cast<const u32*>(p.scales)[strip * 8 + lane / 4], low, high);
#pragma unroll
                for (int j = 0; j < kTokens; ++j) {
                    float (&sum)[4] = sums[s * kTokens + j];
                    sum[0] *= low;
                    sum[1] *= low;
                    sum[2] *= high;
                    sum[3] *= high;
                }
            }
        }
    }

    // One stage of one warp.
    __device__ __forceinline__ static void compute(Sums& sums, Zero (&zero)[kStrips], const char* weights,
                                                   const char* scales, const char* zeros, Fragments x) {
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
                    if constexpr (kScaleWeights) spread_halves(scale[s], row_scale[s][0], row_scale[s][1]);
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
                        Mma<T>::run(kSpanSums ? span_sums[s][j] : sums[s * kTokens + j], a, x.low(j, step),
                                    x.high(j, step));
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
                        float (&sum)[4] = sums[s * kTokens + j];
                        sum[0] += span_sums[s][j][0] * low;
                        sum[1] += span_sums[s][j][1] * low;
                        sum[2] += span_sums[s][j][2] * high;
                        sum[3] += span_sums[s][j][3] * high;
                    }
                }
            }
        }
    }
};
