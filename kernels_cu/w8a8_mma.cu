// y[M, N] = (x[M, K] @ w[K, N]) * x_scale[M] * w_scale[N] + bias with 8-bit x and w, on mma.sync tensor cores
// (int8: sm_75 and later; e4m3: sm_89 and later). Scales are applied once, to the finished sum; with scales of blocks,
// after every block of k.
//
// As in w4a16_mma.cu weights are the A operand: a unit is 16 features x 32 k, one 16-byte load a lane is the whole
// fragment of one mma. All warps of a CTA copy an equal share of its weights and of x.
#include "types.cuh"
#include "ptx.cuh"
#include "elements.cuh"
#include "mma.cuh"
#include "activations.cuh"
#include "epilogue.cuh"
#include "stripes.cuh"
#include "eight_bits.cuh"

struct W8A8Arguments {
    const char* weights;
    const float* weight_scales;  // [strips][groups][16]
    const void* x;               // codes, or with kFused 16-bit elements
    // With kFused what the rule of the weight says: x_scales and x_zeros are null or one, fixed beforehand. column_sums
    // are there exactly when codes have zero points.
    const float* x_scales;   // [M], or one; with kBlockScales [groups][scale_stride]
    const int* x_zeros;      // int8: zero points, as many as scales, or null
    const int* column_sums;  // int8 with zero points: [N] sums of w's codes
    const u16* factor;       // kFused: [K], multiplied by x, or null
    u16* y;
    const u16* bias;
    u32* partials;
    u32* arrivals;
    int m, n, k, row_stride, scale_stride;  // scale_stride: 1, or 0 for one scale of all tokens
    Stripes splits;
};

// Q               Int8 or E4m3: type of x and w
// T               element type of y
// kBlockM         tokens of a CTA tile
// kStrips         strips (16 features) of a warp
// kWarpTokens     tokens of a warp: warps along M share the tile's tokens, each reading the weights of its strips
// kWarpsN, kWarpsK  warps along the features and along k
// kWarpK          k of a warp in one stage
// kStages         stages of the pipeline
// kPromoteK       k of a warp that the tensor core sums before an fp32 addition takes over; 0: all of them
// kBlockScales    scales for every 128 k, of a token and of 128 features: both multiply the sum of a stage
// kFused          x comes in 16 bits; each CTA quantizes its tokens before the main loop and keeps their codes
// kAligned        kFused: rows of x start at multiples of 16 bytes and K is a multiple of 8
// kWhole          K is a multiple of the k of a stage
// kVector         features stored at once
template <class Q, class T, int kBlockM, int kWarpTokens, int kStrips, int kWarpsN, int kWarpsK, int kWarpK,
          int kStages, int kPromoteK, bool kBlockScales, bool kFused, bool kAligned, bool kWhole, int kVector>
struct W8A8 {
    using Sum = typename Q::Accumulator;
    static constexpr int kWarpsM = kBlockM / kWarpTokens;
    static constexpr int kWarps = kWarpsM * kWarpsN * kWarpsK;
    static constexpr int kThreads = kWarps * kWarpSize;
    static constexpr int kBlockN = kWarpsN * kStrips * 16;
    static constexpr int kBlockK = kWarpsK * kWarpK;
    static constexpr int kSteps = kWarpK / 32;       // mma steps of a warp in a stage
    static constexpr int kUnits = kBlockK / 32;      // units of a strip in a stage
    static constexpr int kTokens = kWarpTokens / 8;  // n8 columns of tokens of a warp

    // A period of k is summed in `part` before it is added to `sums`.
    static constexpr int kPeriodK = kBlockScales ? kWarpK : kPromoteK;
    static constexpr bool kPromotes = kPeriodK > 0;
    static constexpr int kPeriodSteps = kPromotes ? min_of(kPeriodK / 32, kSteps) : 1;
    static constexpr int kPeriodStages = kPromotes ? max_of(1, kPeriodK / kWarpK) : 1;

    static_assert(kWarpTokens % 8 == 0 && kBlockM % kWarpTokens == 0, "warps along M share the tile's tokens evenly");
    static_assert(kWarpK % 64 == 0, "one ldmatrix.x4 holds 64 k of eight tokens");
    static_assert(kStages >= 2, "one stage is filled while another is read");
    static_assert(kPromoteK % 32 == 0 && (kPromoteK < kWarpK || kPromoteK % kWarpK == 0), "periods fit stages");
    static_assert(!kBlockScales || kWarpK <= 128, "a stage of a warp lies in one block of 128 k");

    // Codes are padded to whole 16-byte pieces when they are made.
    using X = ActivationTile<kThreads, kBlockM, kBlockK, 1, true, kWhole>;
    using Fragments = typename X::template Fragments<kTokens>;
    using Out = Epilogue<Sum, T, kThreads, kBlockM, kBlockN, kWarpsK, kStrips, kTokens, kVector>;

    // Weights of a stage: [strip of the CTA][unit][lane], 16 bytes each. A warp copies kCopyUnits of kCopyStrips.
    static constexpr int kPieces = kWarpsN * kStrips * kUnits;  // of 512 bytes
    static constexpr int kShare = max_of(1, kPieces / kWarps);
    static constexpr int kCopyUnits = min_of(kShare, kUnits);
    static constexpr int kCopyStrips = kShare / kCopyUnits;

    // Shared memory: first what the epilogue scales sums with, which the CTA fetches while its pipeline fills (with
    // kBlockScales nothing); then stages of x (unless fused) and weights; with kFused the codes of all stages. The
    // epilogue takes all but the first.
    static constexpr int kPlaces = ceil_div(max_of(kBlockN / 4 - 8, 0), 32) * 32 + 8;  // 8 of 32 banks: see Front
    static constexpr int kFront = kBlockScales ? 0 : ceil_div(8 * (kBlockM + 4 * kPlaces), 128) * 128;
    static constexpr int kWeightsAt = kFused ? 0 : X::kBytes;
    static constexpr int kStageBytes = ceil_div(kWeightsAt + kPieces * 512, 128) * 128;
    static constexpr int kCodesAt = kFront + kStages * kStageBytes;

    // A warp quantizes a run of a row at a time, with all its loads on their way at once. This comes before the main loop:
    // what it takes adds to the kernel's time. 16-byte pieces of a lane, first for the largest magnitude, then for codes:
    static constexpr int kFindRun = 4, kEncodeRun = 2;
    static constexpr bool kRepeats = kTokens == 1;    // rows past M: fragments repeat the last one, or ...
    static constexpr int kStagePieces = kBlockK / 8;  // ... they are filled with zeros

    // The front of shared memory. Features lie in four rows, so that lanes that take four in a row each, one after the
    // other, meet different banks, and so do neighbours.
    struct Front {
        float scales[kBlockM], zeros[kBlockM];  // of tokens
        float weight_scales[4 * kPlaces];       // of features ...
        int column_sums[4 * kPlaces];           // ... where codes have zero points

        __device__ __forceinline__ static int place(int feature) { return feature % 4 * kPlaces + feature / 4; }
    };
    static_assert(kBlockScales || sizeof(Front) <= kFront, "the front holds its members");

    // What is known before the main loop; a fused kernel finds scales of tokens itself.
    __device__ __forceinline__ static void fetch_front(const W8A8Arguments& a, Front& front, int m0, int n0) {
        const int thread = static_cast<int>(threadIdx.x);
        for (int i = thread; i < kBlockN; i += kThreads) {
            const int at = i / 16 * 16 + i % 16 / 2 + i % 2 * 8;  // the feature whose scale is the strip's i-th
            front.weight_scales[Front::place(at)] = n0 + i < (a.n + 15) / 16 * 16 ? a.weight_scales[n0 + i] : 0.0f;
            if (a.column_sums != nullptr) front.column_sums[Front::place(i)] = n0 + i < a.n ? a.column_sums[n0 + i] : 0;
        }
        if constexpr (!kFused) {
            for (int r = thread; r < kBlockM; r += kThreads) {
                const int token = min(m0 + r, a.m - 1) * a.scale_stride;
                front.scales[r] = a.x_scales[token];
                front.zeros[r] = a.x_zeros != nullptr ? static_cast<float>(a.x_zeros[token]) : 0.0f;
            }
        }
    }

    // Quantizes the tile's tokens for stages first to last - 1.
    __device__ __forceinline__ static void quantize(const W8A8Arguments& a, char* shared, int m0, int first, int last) {
        const int warp = static_cast<int>(threadIdx.x) / kWarpSize, lane = static_cast<int>(threadIdx.x) % kWarpSize;
        const int rows = min(kBlockM, a.m - m0);
        const u16* x = static_cast<const u16*>(a.x) + static_cast<long long>(m0) * a.row_stride;
        find_scales(a, shared, x, rows);
        const float* scales = reinterpret_cast<const Front*>(shared)->scales;  // then zero points
        constexpr int kRun = kEncodeRun, kRunPieces = kRun * kWarpSize;
        const int pieces = (last - first) * kStagePieces, runs = ceil_div(pieces, kRunPieces);
        for (int run = warp; run < (kRepeats ? rows : kBlockM) * runs; run += kWarps) {
            const int r = run / runs, piece0 = run % runs * kRunPieces + lane;
            const u16* row = x + static_cast<long long>(r) * a.row_stride;
            const Divider divider(scales[r]);
            Vec16 v[kRun];
#pragma unroll
            for (int i = 0; i < kRun; ++i) {
                const int piece = piece0 + i * kWarpSize;
                v[i] = Vec16{{0u, 0u, 0u, 0u}};
                if (r < rows && piece < pieces) v[i] = load_piece<kAligned>(row, first * kStagePieces + piece, a.k);
            }
#pragma unroll
            for (int i = 0; i < kRun; ++i) {
                const int piece = piece0 + i * kWarpSize, from = first * kStagePieces + piece;
                if (piece >= pieces) break;
                float values[8];
                piece_values<T, kAligned>(values, v[i], a.factor, from, a.k);
                const float zero = scales[kBlockM + r];
                uint2 codes = a.x_scales == nullptr ? encode_piece<Q, true>(values, divider, zero)
                                                    : encode_piece<Q, false>(values, divider, zero);
                if (from * 8 >= a.k) codes = make_uint2(0u, 0u);  // these may meet weights: see fetch_stage
                const int tile = piece / kStagePieces, at = piece % kStagePieces;
                char* to = shared + kCodesAt + tile * X::kBytes + r * kBlockK + ((at / 2) ^ X::swizzle(r)) * 16;
                *reinterpret_cast<uint2*>(to + at % 2 * 8) = codes;
            }
        }
    }

    // Writes a scale and a zero point for each token, [2][kBlockM] floats; those of rows past M are 1 and 0.
    __device__ __forceinline__ static void find_scales(const W8A8Arguments& a, char* shared, const u16* x, int rows) {
        const int thread = static_cast<int>(threadIdx.x);
        const bool fixed = a.x_scales != nullptr, zeros = a.column_sums != nullptr;
        float* scales = reinterpret_cast<float*>(shared);
        u32* extents = reinterpret_cast<u32*>(shared);
        if (!fixed) {
            for (int i = thread; i < 2 * kBlockM; i += kThreads) extents[i] = 0u;
            __syncthreads();
            if (zeros || a.factor != nullptr) {
                find_extents<true>(a, extents, x, rows);
            } else {
                find_extents<false>(a, extents, x, rows);
            }
            __syncthreads();
        }
        for (int r = thread; r < kBlockM; r += kThreads) {
            float scale = 1.0f, zero = 0.0f;
            if (fixed) {
                scale = *a.x_scales;
                if (a.x_zeros != nullptr) zero = static_cast<float>(*a.x_zeros);
            } else if (zeros) {
                lopsided(__uint_as_float(extents[r]), -__uint_as_float(extents[kBlockM + r]), scale, zero);
            } else {
                const float most = __uint_as_float(max(extents[r], extents[kBlockM + r]));
                scale = safe_scale(__fdiv_rn(most, largest_code(Q())));
            }
            scales[r] = scale, scales[kBlockM + r] = zero;
        }
        __syncthreads();
    }

    // Writes bits of the largest value above zero and below, [2][kBlockM]; kGeneral: with the factor, and apart.
    template <bool kGeneral>
    __device__ __forceinline__ static void find_extents(const W8A8Arguments& a, u32* extents, const u16* x, int rows) {
        using Range = Extent<T, kAligned, kGeneral, kGeneral>;
        const int warp = static_cast<int>(threadIdx.x) / kWarpSize, lane = static_cast<int>(threadIdx.x) % kWarpSize;
        constexpr int kRun = kFindRun, kRunPieces = kRun * kWarpSize;
        const int runs = ceil_div((a.k + 7) / 8, kRunPieces);
        for (int run = warp; run < rows * runs; run += kWarps) {
            const int r = run / runs, piece0 = run % runs * kRunPieces + lane;
            const u16* row = x + static_cast<long long>(r) * a.row_stride;
            Vec16 v[kRun];
#pragma unroll
            for (int i = 0; i < kRun; ++i) v[i] = load_piece<kAligned>(row, piece0 + i * kWarpSize, a.k);
            Range range;
#pragma unroll
            for (int i = 0; i < kRun; ++i) range.include(v[i], a.factor, piece0 + i * kWarpSize, a.k);
            range.up = max_of_lanes<kWarpSize>(range.up);
            if (kGeneral) range.down = max_of_lanes<kWarpSize>(range.down);
            if (lane == 0) {
                atomicMax(extents + r, __float_as_uint(range.above()));
                if (kGeneral) atomicMax(extents + kBlockM + r, range.down);
            }
        }
    }

    // The place in a tile of codes that a lane's fragments start from.
    __device__ __forceinline__ static u32 lane_address(int lane, int token, int rows) {
        if constexpr (!kFused || !kRepeats) return Fragments::lane_address(lane, token);
        const int row = min(token + (lane & 7), rows - 1);
        return row * kBlockK + (((lane >> 3) ^ X::swizzle(row)) * 16);
    }

    __device__ __forceinline__ static void run(const W8A8Arguments& a) {
        extern __shared__ __align__(128) char shared_memory[];
        const u32 shared = shared_address(shared_memory) + kFront;
        const int lane = static_cast<int>(threadIdx.x) % kWarpSize, warp = static_cast<int>(threadIdx.x) / kWarpSize;
        const int warp_k = warp % kWarpsK, warp_n = warp / kWarpsK % kWarpsN, warp_m = warp / (kWarpsK * kWarpsN);

        // CTAs of one tile follow each other; then tiles along M, which read the same weights.
        const int m_tiles = (a.m + kBlockM - 1) / kBlockM;
        const int tile = static_cast<int>(blockIdx.x) / a.splits.ctas,
                  split = static_cast<int>(blockIdx.x) % a.splits.ctas;
        const int m0 = tile % m_tiles * kBlockM, n0 = tile / m_tiles * kBlockN;
        const int units = (a.k + 31) / 32, last_strip = (a.n + 15) / 16 - 1;
        const int first = split * a.splits.share + min(split, a.splits.extra);
        const int last = first + a.splits.share + (split < a.splits.extra ? 1 : 0);

        const int k0 = first * kBlockK;
        X x_tile(kFused ? nullptr : static_cast<const u8*>(a.x) + static_cast<long long>(m0) * a.row_stride, a.m - m0,
                 a.k, k0, a.row_stride);
        const int piece0 = warp * kShare, copy_strip = n0 / 16 + piece0 / kUnits;
        int unit = k0 / 32 + piece0 % kUnits;
        const char* strip_at[kCopyStrips];
#pragma unroll
        for (int s = 0; s < kCopyStrips; ++s) {
            // Strips past N repeat the last one; their results are never stored.
            const long long at = static_cast<long long>(min(copy_strip + s, last_strip)) * units + (kWhole ? unit : 0);
            strip_at[s] = a.weights + (at * kWarpSize + lane) * 16;
        }
        const u32 weights_to = kWeightsAt + piece0 * 512 + lane * 16;
        const bool copies = kPieces >= kWarps || piece0 < kPieces;

        Copy16 pieces[kShare];
        const auto fetch_stage = [&](u32 slot) {  // the next stage, to the slot at this offset
            if constexpr (!kFused) x_tile.fetch(shared + slot);
            if (copies) {
                for_each<kShare>([&](auto index) {
                    constexpr int kPiece = decltype(index)::value, kStrip = kPiece / kCopyUnits;
                    constexpr int kUnit = kPiece % kCopyUnits, kFrom = kWhole ? kUnit * 512 : 0;
                    // Past the last unit x is zero: any weights will do.
                    const char* from = strip_at[kStrip] + (kWhole ? 0 : min(unit + kUnit, units - 1) * 512);
                    pieces[kPiece].template fetch<kPiece * 512, kFrom>(shared + slot + weights_to, from);
                });
            }
            if constexpr (kWhole) {
#pragma unroll
                for (int s = 0; s < kCopyStrips; ++s) strip_at[s] += kUnits * 512;
            } else {
                unit += kUnits;
            }
        };
        const auto land_stage = [&](u32 slot) {
            if constexpr (!kFused) x_tile.land(shared + slot);
            if (copies) {
#pragma unroll
                for (int i = 0; i < kShare; ++i) pieces[i].land(shared + slot + weights_to + i * 512);
            }
        };

        typename Out::Fragments sums;  // [strip * kTokens + column of tokens]
        Sum part[kPromotes ? kStrips : 1][kPromotes ? kTokens : 1][4];
#pragma unroll
        for (int f = 0; f < Out::kFragments; ++f) sums[f][0] = sums[f][1] = sums[f][2] = sums[f][3] = Sum(0);

#pragma unroll
        for (int i = 0; i < kStages - 1; ++i) {
            if (first + i < last) {
                fetch_stage(i * kStageBytes);
                land_stage(i * kStageBytes);
            }
            copy_async_commit();
        }
        if constexpr (!kBlockScales) fetch_front(a, *reinterpret_cast<Front*>(shared_memory), m0, n0);
        if constexpr (kFused) quantize(a, shared_memory, m0, first, last);  // while the first weights are on their way

        // Scales of blocks: two tokens a lane, as in its fragments; one for all of the warp's features.
        const int groups = (a.k + 127) / 128;
        const float* token_scales = a.x_scales + m0 + warp_m * kWarpTokens + 2 * (lane & 3);
        const float* block_scales =
            a.weight_scales + static_cast<long long>(min(n0 / 16 + warp_n * kStrips, last_strip)) * groups * 16;
        // Where every stage has blocks of its own, all of them within K, they are walked along.
        constexpr bool kWalks = kBlockK % 128 == 0 && (kWhole || kBlockK == 128);
        const int group0 = (k0 + warp_k * kWarpK) / 128;
        const float* block_at = block_scales + group0 * 16;
        const float* token_at = token_scales + static_cast<long long>(group0) * a.scale_stride;
        float scale[kBlockScales ? kTokens : 1][2], block_scale = 1.0f;

        const auto promote = [&] {
            if constexpr (kPromotes) {
#pragma unroll
                for (int j = 0; j < kTokens; ++j) {
                    float by[2] = {1.0f, 1.0f};
                    if constexpr (kBlockScales) by[0] = scale[j][0] * block_scale, by[1] = scale[j][1] * block_scale;
#pragma unroll
                    for (int s = 0; s < kStrips; ++s) {
#pragma unroll
                        for (int c = 0; c < 4; ++c) {
                            Sum& sum = sums[s * kTokens + j][c];
                            sum = kBlockScales ? __fmaf_rn(part[s][j][c], by[c & 1], sum) : sum + part[s][j][c];
                        }
                    }
                }
            }
        };

        const u32 x_lane = lane_address(lane, warp_m * kWarpTokens, min(kBlockM, a.m - m0));
        const u32 weights_at = kFront + kWeightsAt + (warp_n * kStrips * kUnits + warp_k * kSteps) * 512 + lane * 16;
        u32 slot = 0, free_slot = (kStages - 1) * kStageBytes, codes_at = shared + (kFused ? kCodesAt - kFront : 0);
        const auto turn = [&](int stage, int i) {          // stage i of its period
            if constexpr (kPeriodStages % kStages == 0) {  // then slots are constants
                slot = i % kStages * kStageBytes;
                free_slot = (i + kStages - 1) % kStages * kStageBytes;
            }
            copy_async_wait<kStages - 2>();
            __syncthreads();  // this stage is there for all; all have left the slot that is filled next
            const bool more = stage + kStages - 1 < last;
            if (more) fetch_stage(free_slot);
            copy_async_commit();
            if constexpr (kBlockScales) {  // used after the stage's products, which hide the latency
                if constexpr (!kWalks) {
                    const int group = min((stage * kBlockK + warp_k * kWarpK) / 128, groups - 1);
                    block_at = block_scales + group * 16;
                    token_at = token_scales + static_cast<long long>(group) * a.scale_stride;
                }
                block_scale = *block_at;
#pragma unroll
                for (int j = 0; j < kTokens; ++j) {
                    const float2 two = *reinterpret_cast<const float2*>(token_at + j * 8);
                    scale[j][0] = two.x, scale[j][1] = two.y;
                }
                if constexpr (kWalks) {
                    block_at += kBlockK / 128 * 16;
                    token_at += kBlockK / 128 * static_cast<long long>(a.scale_stride);
                }
            }

            const char* at = shared_memory + slot + weights_at;
            Fragments b(kFused ? codes_at : shared + slot, x_lane, warp_k * kSteps);
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                b.load(step);
#pragma unroll
                for (int s = 0; s < kStrips; ++s) {
                    const Vec16 v = load_16(at + (s * kUnits + step) * 512);
#pragma unroll
                    for (int j = 0; j < kTokens; ++j) {
                        if constexpr (kPromotes) {
                            if (i == 0 && step % kPeriodSteps == 0) {
                                Mma<Q>::start(part[s][j], v.w, b.low(j, step), b.high(j, step));
                            } else {
                                Mma<Q>::run(part[s][j], v.w, b.low(j, step), b.high(j, step));
                            }
                        } else {
                            Mma<Q>::run(sums[s * kTokens + j], v.w, b.low(j, step), b.high(j, step));
                        }
                    }
                }
                if (kPeriodStages == 1 && (step + 1) % kPeriodSteps == 0) promote();
            }
            if (!kHasCopyAsync && more) land_stage(free_slot);
            free_slot = slot;
            slot = slot == (kStages - 1) * kStageBytes ? 0 : slot + kStageBytes;
            if constexpr (kFused) codes_at += X::kBytes;
        };
        for (int stage = first; stage < last; stage += kPeriodStages) {
#pragma unroll
            for (int i = 0; i < kPeriodStages; ++i) {
                if (i == 0 || stage + i < last) turn(stage + i, i);
            }
            if constexpr (kPeriodStages > 1) promote();
        }
        copy_async_wait<0>();
        __syncthreads();  // the pipeline's memory becomes the epilogue's

        // Where this CTA and thread stand, computed again, so that it takes no registers from the main loop.
        const int cta = static_cast<int>(kept(blockIdx.x)), end_tile = cta / a.splits.ctas;
        const int end_m0 = end_tile % m_tiles * kBlockM, end_n0 = end_tile / m_tiles * kBlockN;
        const u32 thread = kept(threadIdx.x), rank = thread / kWarpSize;
        const Front& front = *reinterpret_cast<const Front*>(shared_memory);
        const auto scale_sum = [&](int token, int feature, Sum sum) {
            if constexpr (kBlockScales) return sum;
            const int column = Front::place(feature - end_n0);
            const float by = front.scales[token - end_m0], w = front.weight_scales[column];
            float value = static_cast<float>(sum);
            if (a.column_sums != nullptr) {
                // In 64 bits: a zero point times a sum of codes may leave int32 where the result does not.
                const long long zero = static_cast<int>(front.zeros[token - end_m0]);
                value = static_cast<float>(static_cast<long long>(sum) - zero * front.column_sums[column]);
            }
            // The smaller scale first: no intermediate over- or underflows unless the result does. (fminf and fmaxf would
            // lose a scale that is NaN.)
            return by < w ? value * by * w : value * w * by;
        };
        const typename Out::Place place = {thread % kWarpSize, rank, rank % kWarpsK,
                                           rank / kWarpsK % kWarpsN * (kStrips * 16),
                                           rank / (kWarpsK * kWarpsN) * kWarpTokens};
        const typename Out::template Target<decltype(scale_sum)> target{a.y, a.bias, end_m0,   end_n0,
                                                                        a.m, a.n,    scale_sum};
        Out::run(shared_memory + kFront, sums, place, a.partials, a.arrivals, end_tile, cta - end_tile * a.splits.ctas,
                 a.splits.ctas, target);
    }
};
