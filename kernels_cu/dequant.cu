// Packed 2-, 4- or 8-bit weights -> dense w[K, N] in T, row by row as cuBLAS wants it: reads each code and writes each
// weight once.
//
// A warp unpacks one unit (16 features x kUnitK k); the CTA's warps lie side by side along the features and turn their
// fragments into rows in shared memory, so that 16-byte stores cover whole sectors.
#include "types.cuh"
#include "ptx.cuh"
#include "elements.cuh"
#include "codes.cuh"

// T, S       element types of the result and of the scales
// kBits      bits of a weight: 2, 4, 8
// kWarps     warps of a CTA, one strip (16 features) each
// kUnits     units of a CTA, one after the other
// kGroup     k of a quantization group; 0: one group a column
// kHasZeros  whether groups have zero points (else half of the codes)
// kVector    features stored at once: 8 (N % 8 == 0) or 1
template <class T, class S, bool kSameType, int kBits, int kWarps, int kUnits, int kGroup, bool kHasZeros, int kVector>
struct Dequant {
    using Code = Codes<T, kBits>;
    static constexpr int kUnitK = Code::kUnitK;
    static constexpr int kSteps = kUnitK / 16;
    static constexpr int kThreads = kWarps * kWarpSize;
    static constexpr int kBlockN = kWarps * 16;
    // Eight elements of padding put the four rows that a store of a quarter-warp touches into different banks.
    static constexpr int kPitch = kBlockN + 8;
    static constexpr int kSharedBytes = kUnitK * kPitch * 2;

    __device__ __forceinline__ static u32 scaled(u32 pair, u32 scale_pair, float scale) {
        if constexpr (kSameType) {
            return T::mul2(pair, scale_pair);  // integers times a scale: rounded once
        } else {
            return T::pack(T::to_float(static_cast<u16>(pair)) * scale,
                           T::to_float(static_cast<u16>(pair >> 16)) * scale);
        }
    }

    __device__ __forceinline__ static void run(const uint4* weights, const u32* scales, const u16* zeros, u16* w, int n,
                                               int k) {
        extern __shared__ __align__(128) u16 rows[];
        const int lane = static_cast<int>(threadIdx.x) % kWarpSize, warp = static_cast<int>(threadIdx.x) / kWarpSize;
        const int g = lane / 4, t = lane % 4;
        const int n_tiles = (n + kBlockN - 1) / kBlockN;
        const int n0 = static_cast<int>(blockIdx.x) % n_tiles * kBlockN;
        const int unit0 = static_cast<int>(blockIdx.x) / n_tiles * kUnits;
        const int units = (k + kUnitK - 1) / kUnitK, groups = kGroup == 0 ? 1 : (k + kGroup - 1) / kGroup;
        const int strip = n0 / 16 + warp;
        const bool inside = strip * 16 < n;

        for (int unit = unit0; unit < min(unit0 + kUnits, units); ++unit) {
            if (inside) {
                const uint4 packed = weights[(static_cast<long long>(strip) * units + unit) * 32 + lane];
                u16* at = rows + 2 * t * kPitch + warp * 16 + g;
                u32 pair = 0;
                typename Code::Zero zero = Code::symmetric();
#pragma unroll
                for (int step = 0; step < kSteps; ++step) {
                    if (step == 0 || (kGroup != 0 && kGroup < kUnitK && step * 16 % (kGroup == 0 ? 1 : kGroup) == 0)) {
                        const int group =
                            kGroup == 0 ? 0 : min((unit * kUnitK + step * 16) / max(kGroup, 1), groups - 1);
                        const long long row = (static_cast<long long>(strip) * groups + group) * 8 + g;
                        pair = scales[row];
                        if constexpr (kHasZeros) zero = Code::zero(zeros[row]);
                    }
                    float low, high;
                    scales_to_float<S>(pair, low, high);
                    u32 a[4];
                    Code::fragment(a, packed, step, zero);
#pragma unroll
                    for (int r = 0; r < 4; ++r) {
                        const u32 both = permute_bytes(pair, pair, r & 1 ? 0x3232 : 0x1010);
                        const u32 v = scaled(a[r], both, r & 1 ? high : low);
                        u16* out = at + (step * 16 + (r >> 1) * 8) * kPitch + (r & 1) * 8;
                        out[0] = static_cast<u16>(v);
                        out[kPitch] = static_cast<u16>(v >> 16);
                    }
                }
            }
            __syncthreads();
            store_rows(rows, w, unit * kUnitK, n0, n, k);
            __syncthreads();  // the next unit overwrites the rows
        }
    }

    __device__ __forceinline__ static void store_rows(const u16* rows, u16* w, int k0, int n0, int n, int k) {
        constexpr int kPieces = kUnitK * kBlockN / kVector;
        for (int piece = static_cast<int>(threadIdx.x); piece < kPieces; piece += kThreads) {
            const int row = piece / (kBlockN / kVector), column = piece % (kBlockN / kVector) * kVector;
            if (k0 + row >= k || n0 + column >= n) continue;
            const u16* from = rows + row * kPitch + column;
            u16* to = w + static_cast<long long>(k0 + row) * n + n0 + column;
            if constexpr (kVector == 8) {
                *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
            } else {
                *to = *from;
            }
        }
    }
};
