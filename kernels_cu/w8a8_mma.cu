// y[M, N] = (x[M, K] @ w[K, N]) * x_scale[M] * w_scale[N] + bias with 8-bit x and w, on mma.sync tensor cores
// (int8: sm_75 and later; e4m3: sm_89 and later). Scales are applied once, to the finished sum.
//
// As in w4a16_mma.cu weights are the A operand: a unit is 16 features x 32 k, one 16-byte load a lane is the whole
// fragment of one mma. Each warp copies the weights it reads; x is shared by the CTA.
#include "types.cuh"
#include "ptx.cuh"
#include "elements.cuh"
#include "mma.cuh"
#include "activations.cuh"
#include "epilogue.cuh"

// Q               Int8 or E4m3: type of x and w
// T               element type of y
// kBlockM         tokens of a CTA tile
// kStrips         strips (16 features) of a warp
// kWarpTokens     tokens of a warp: warps along M share the tile's tokens, each reading the weights of its strips
// kWarpsN, kWarpsK  warps along the features and along k
// kWarpK          k of a warp in one stage
// kStages         stages of the pipeline
// kWhole          K is a multiple of the k of a stage
// kVector         features stored at once
template <class Q, class T, int kBlockM, int kWarpTokens, int kStrips, int kWarpsN, int kWarpsK, int kWarpK,
          int kStages, bool kWhole, int kVector>
struct W8A8 {
    using Sum = typename Q::Accumulator;
    static constexpr int kWarpsM = kBlockM / kWarpTokens;
    static constexpr int kWarps = kWarpsM * kWarpsN * kWarpsK;
    static constexpr int kThreads = kWarps * kWarpSize;
    static constexpr int kBlockN = kWarpsN * kStrips * 16;
    static constexpr int kBlockK = kWarpsK * kWarpK;
    static constexpr int kUnits = kWarpK / 32;       // units of a strip in a warp's share of a stage: mma steps
    static constexpr int kTokens = kWarpTokens / 8;  // n8 columns of tokens of a warp

    static_assert(kWarpTokens % 8 == 0 && kBlockM % kWarpTokens == 0, "warps along M share the tile's tokens evenly");
    static_assert(kWarpK % 64 == 0, "one ldmatrix.x4 holds 64 k of eight tokens");
    static_assert(kStages >= 2, "one stage is filled while another is read");

    // Codes are padded to whole 16-byte pieces when they are made.
    using X = ActivationTile<kThreads, kBlockM, kBlockK, 1, true, kWhole>;
    using Fragments = typename X::template Fragments<kTokens>;
    using Out = Epilogue<Sum, T, kThreads, kBlockM, kBlockN, kWarpsK, kVector>;

    // Weights of a stage: [warp_n][warp_k][strip][unit][lane], 16 bytes each; warps along M copy a share each.
    static constexpr int kPieces = kStrips * kUnits;  // 512-byte pieces of one (warp_n, warp_k)
    static constexpr int kWeightsAt = X::kBytes;
    static constexpr int kStageBytes = ceil_div(kWeightsAt + kWarpsN * kWarpsK * kPieces * 512, 128) * 128;
    static constexpr int kSharedBytes = max_of(kStages * kStageBytes, Out::kSharedBytes);

    __device__ __forceinline__ static void run(const char* weights, const float* weight_scales, const u8* x,
                                               const float* x_scales, u16* y, const u16* bias, u32* partials,
                                               u32* arrivals, int m, int n, int k, int row_stride, int splits) {
        extern __shared__ __align__(128) char shared_memory[];
        const u32 shared = shared_address(shared_memory);
        const int lane = static_cast<int>(threadIdx.x) % kWarpSize, warp = static_cast<int>(threadIdx.x) / kWarpSize;
        const int warp_k = warp % kWarpsK, warp_n = warp / kWarpsK % kWarpsN, warp_m = warp / (kWarpsK * kWarpsN);

        const int m_tiles = (m + kBlockM - 1) / kBlockM, n_tiles = (n + kBlockN - 1) / kBlockN;
        const int tile = static_cast<int>(blockIdx.x) % (m_tiles * n_tiles);
        const int split = static_cast<int>(blockIdx.x) / (m_tiles * n_tiles);
        const int m0 = tile % m_tiles * kBlockM, n0 = tile / m_tiles * kBlockN;

        const int units = (k + 31) / 32;
        const int last_strip = (n + 15) / 16 - 1, strip0 = n0 / 16 + warp_n * kStrips;
        const int stages = (k + kBlockK - 1) / kBlockK;
        const int stages_a_split = (stages + splits - 1) / splits;
        const int first = min(split * stages_a_split, stages), last = min(first + stages_a_split, stages);

        const int k0 = first * kBlockK;
        X x_tile(x + static_cast<long long>(m0) * row_stride, m - m0, k, k0, row_stride);
        const char* strip_at[kStrips];
        int unit = (k0 + warp_k * kWarpK) / 32;
#pragma unroll
        for (int s = 0; s < kStrips; ++s) {
            // Strips past N repeat the last one; their results are never stored.
            const long long at = static_cast<long long>(min(strip0 + s, last_strip)) * units + (kWhole ? unit : 0);
            strip_at[s] = weights + (at * kWarpSize + lane) * 16;
        }
        const u32 weights_to = kWeightsAt + (warp_n * kWarpsK + warp_k) * kPieces * 512 + lane * 16;

        Copy16 pieces[kPieces];
        const auto mine = [&](int piece) { return kWarpsM == 1 || piece % kWarpsM == warp_m; };
        const auto fetch_stage = [&](u32 slot) {  // the next stage, to the slot at this offset
            x_tile.fetch(shared + slot);
#pragma unroll
            for (int s = 0; s < kStrips; ++s) {
#pragma unroll
                for (int u = 0; u < kUnits; ++u) {
                    const int piece = s * kUnits + u;
                    // Past the last unit x is zero: any weights will do.
                    const char* from = strip_at[s] + (kWhole ? u : min(unit + u, units - 1)) * 512;
                    if (mine(piece)) pieces[piece].fetch(shared + slot + weights_to + piece * 512, from);
                }
                if constexpr (kWhole) strip_at[s] += kBlockK / 32 * 512;
            }
            unit += kBlockK / 32;
        };
        const auto land_stage = [&](u32 slot) {
            x_tile.land(shared + slot);
#pragma unroll
            for (int piece = 0; piece < kPieces; ++piece) {
                if (mine(piece)) pieces[piece].land(shared + slot + weights_to + piece * 512);
            }
        };

        Sum sums[kStrips][kTokens][4];
#pragma unroll
        for (int s = 0; s < kStrips; ++s) {
#pragma unroll
            for (int j = 0; j < kTokens; ++j) sums[s][j][0] = sums[s][j][1] = sums[s][j][2] = sums[s][j][3] = Sum(0);
        }

#pragma unroll
        for (int i = 0; i < kStages - 1; ++i) {
            if (first + i < last) {
                fetch_stage(i * kStageBytes);
                land_stage(i * kStageBytes);
            }
            copy_async_commit();
        }

        const u32 x_lane = Fragments::lane_address(lane, warp_m * kWarpTokens);
        u32 slot = 0, free_slot = (kStages - 1) * kStageBytes;
        for (int stage = first; stage < last; ++stage) {
            copy_async_wait<kStages - 2>();
            __syncthreads();  // this stage is there for all; all have left the slot that is filled next
            const bool more = stage + kStages - 1 < last;
            if (more) fetch_stage(free_slot);
            copy_async_commit();

            const char* at = shared_memory + slot + weights_to;
            Fragments b(shared + slot, x_lane, warp_k * kUnits);
#pragma unroll
            for (int step = 0; step < kUnits; ++step) {
                b.load(step);
#pragma unroll
                for (int s = 0; s < kStrips; ++s) {
                    const uint4 v = *reinterpret_cast<const uint4*>(at + (s * kUnits + step) * 512);
                    const u32 a[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                    for (int j = 0; j < kTokens; ++j) Mma<Q>::run(sums[s][j], a, b.low(j, step), b.high(j, step));
                }
            }
            if (!kHasCopyAsync && more) land_stage(free_slot);
            free_slot = slot;
            slot = slot == (kStages - 1) * kStageBytes ? 0 : slot + kStageBytes;
        }
        copy_async_wait<0>();
        __syncthreads();  // the pipeline's memory becomes the epilogue's

        u32* tile_sums = reinterpret_cast<u32*>(shared_memory);
#pragma unroll
        for (int s = 0; s < kStrips; ++s) {
#pragma unroll
            for (int j = 0; j < kTokens; ++j) {
                Out::put(tile_sums, warp_k, (warp_n * kStrips + s) * 16, warp_m * kWarpTokens + j * 8, lane,
                         sums[s][j]);
            }
        }
        Out::run(tile_sums, y, bias, partials, arrivals, tile, split, splits, m0, n0, m, n,
                 [&](int token, int feature, Sum sum) {
                     // The smaller scale first: no intermediate over- or underflows unless the result does.
                     const float a = x_scales[token];
                     const float b = weight_scales[(feature >> 4) * 16 + (feature & 7) * 2 + ((feature >> 3) & 1)];
                     return static_cast<float>(sum) * fminf(a, b) * fmaxf(a, b);
                 });
    }
};
