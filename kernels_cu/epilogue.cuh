// From accumulators to y: partial sums of the warps that share a tile are added in shared memory, those of the CTAs that
// share it (split-K) through global memory by whichever CTA arrives last, always in the order of the split index, so
// that the bits of y do not depend on timing. No atomics touch y.
#pragma once

// ld.global.cg (Cache Operators): partial sums come from other SMs; L1 is not coherent, so read them from L2.
__device__ __forceinline__ Vec16 load_l2_16(const void* pointer) {
    Vec16 v;
    asm volatile("ld.global.cg.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
                 : "l"(pointer)
                 : "memory");
    return v;
}

__device__ __forceinline__ float from_bits(u32 bits, float) { return __uint_as_float(bits); }
__device__ __forceinline__ int from_bits(u32 bits, int) { return static_cast<int>(bits); }
__device__ __forceinline__ u32 to_bits(float v) { return __float_as_uint(v); }
__device__ __forceinline__ u32 to_bits(int v) { return static_cast<u32>(v); }

// Sum: float or int. T: element type of y. kVector: features stored at once (4 when N % 4 == 0, else 1).
template <class Sum, class T, int kThreads, int kBlockM, int kBlockN, int kWarpsK, int kVector>
struct Epilogue {
    // Four words of padding put the four token pairs of a fragment into different banks.
    static constexpr int kPitch = kBlockN + 4;
    static constexpr int kSlotWords = kBlockM * kPitch;
    static constexpr int kSharedBytes = kWarpsK * kSlotWords * 4 + 16;  // the last 16: the arrival flag
    static constexpr int kItems = kBlockM * kBlockN / 4;                // an item: one token, four features
    static constexpr int kItemsPerRow = kBlockN / 4;

    // Writes one 16 x 8 accumulator fragment; `feature` and `token` are its corner in the CTA's tile.
    __device__ __forceinline__ static void put(u32* shared, int warp_k, int feature, int token, int lane,
                                               const Sum (&d)[4]) {
        u32* slot = shared + warp_k * kSlotWords + (token + 2 * (lane & 3)) * kPitch + feature + (lane >> 2);
        slot[0] = to_bits(d[0]);
        slot[kPitch] = to_bits(d[1]);
        slot[8] = to_bits(d[2]);
        slot[kPitch + 8] = to_bits(d[3]);
    }

    __device__ __forceinline__ static void add(Sum (&sum)[4], const Vec16& v) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] += from_bits(v.w[i], Sum(0));
    }

    __device__ __forceinline__ static void gather(Sum (&sum)[4], const u32* shared, int item) {
        const u32* at = shared + (item / kItemsPerRow) * kPitch + (item % kItemsPerRow) * 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] = Sum(0);
#pragma unroll
        for (int w = 0; w < kWarpsK; ++w) add(sum, load_16(at + w * kSlotWords));
    }

    // scale(token, feature, sum) -> float turns a finished sum into a value of y, before the bias.
    template <class Scale>
    __device__ __forceinline__ static void store(u16* y, const u16* bias, int item, int m0, int n0, int m, int n,
                                                 const Sum (&sum)[4], Scale scale) {
        const int token = m0 + item / kItemsPerRow, feature = n0 + (item % kItemsPerRow) * 4;
        if (token >= m || feature >= n) return;
        float v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const bool inside = kVector == 4 || feature + i < n;
            v[i] = inside ? scale(token, feature + i, sum[i]) : 0.0f;
            if (bias != nullptr && inside) v[i] += T::to_float(bias[feature + i]);
        }
        u16* out = y + static_cast<long long>(token) * n + feature;
        const u32 low = T::pack(v[0], v[1]), high = T::pack(v[2], v[3]);
        if constexpr (kVector == 4) {
            *reinterpret_cast<uint2*>(out) = make_uint2(low, high);
        } else {
            out[0] = static_cast<u16>(low);
            if (feature + 1 < n) out[1] = static_cast<u16>(low >> 16);
            if (feature + 2 < n) out[2] = static_cast<u16>(high);
            if (feature + 3 < n) out[3] = static_cast<u16>(high >> 16);
        }
    }

    // All threads call the next two once every warp has `put` its fragments; both leave `shared` free to be reused.

    // The tile's sums are complete in this CTA.
    template <class Scale>
    __device__ __forceinline__ static void finish(const u32* shared, u16* y, const u16* bias, int m0, int n0, int m,
                                                  int n, Scale scale) {
        __syncthreads();
        for (int item = static_cast<int>(threadIdx.x); item < kItems; item += kThreads) {
            Sum sum[4];
            gather(sum, shared, item);
            store(y, bias, item, m0, n0, m, n, sum, scale);
        }
        __syncthreads();
    }

    // `count` CTAs hold parts of the tile's sums, this one part `mine`. slot(part) tells where in `partials`, in units
    // of a tile's words, a part is kept. `arrival` counts those that have written theirs; zero before and after.
    template <class Slot, class Scale>
    __device__ __forceinline__ static void combine(u32* shared, u16* y, const u16* bias, u32* partials, u32* arrival,
                                                   int mine, int count, Slot slot, int m0, int n0, int m, int n,
                                                   Scale scale) {
        constexpr long long kTileWords = kBlockM * kBlockN;
        const int thread = static_cast<int>(threadIdx.x);
        const int items = min(kBlockM, m - m0) * kItemsPerRow;  // rows past M are not worth their traffic
        __syncthreads();
        u32* own = partials + slot(mine) * kTileWords;
        for (int item = thread; item < items; item += kThreads) {
            Sum sum[4];
            gather(sum, shared, item);
            *reinterpret_cast<uint4*>(own + item * 4) =
                make_uint4(to_bits(sum[0]), to_bits(sum[1]), to_bits(sum[2]), to_bits(sum[3]));
        }
        // Release: every thread's partial sums are in L2 before the CTA counts itself as arrived.
        __threadfence();
        __syncthreads();
        u32* flag = shared + kWarpsK * kSlotWords;
        // Counts to `count` and wraps to zero by itself, ready for the next launch: a plain store would race.
        if (thread == 0) *flag = atomicInc(arrival, static_cast<u32>(count - 1));
        __syncthreads();
        if (*flag == static_cast<u32>(count - 1)) {
            __threadfence();  // acquire: after the last arrival, the others' partial sums
            for (int item = thread; item < items; item += kThreads) {
                Sum sum[4] = {Sum(0), Sum(0), Sum(0), Sum(0)};
                for (int part = 0; part < count; ++part) {
                    add(sum, load_l2_16(partials + slot(part) * kTileWords + item * 4));
                }
                store(y, bias, item, m0, n0, m, n, sum, scale);
            }
        }
        __syncthreads();
    }

    // Split-K: every tile has `splits` CTAs. partials: [tiles][splits][kBlockM * kBlockN] words; arrivals: [tiles].
    template <class Scale>
    __device__ __forceinline__ static void run(u32* shared, u16* y, const u16* bias, u32* partials, u32* arrivals,
                                               int tile, int split, int splits, int m0, int n0, int m, int n,
                                               Scale scale) {
        if (splits == 1) {
            finish(shared, y, bias, m0, n0, m, n, scale);
        } else {
            const auto slot = [&](int part) { return static_cast<long long>(tile) * splits + part; };
            combine(shared, y, bias, partials, arrivals + tile, split, splits, slot, m0, n0, m, n, scale);
        }
    }
};
