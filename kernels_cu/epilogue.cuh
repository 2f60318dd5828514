// From accumulators to y. Partial sums of the warps that share a tile are added in shared memory, those of the CTAs that
// share it (split-K, stripes) through global memory by whichever CTA arrives last: always in the same order, so that the
// bits of y do not depend on timing. No atomics touch y.
#pragma once

// ld.global.cg (Cache Operators): partial sums come from other SMs; L1 is not coherent, so read them from L2. kOffset:
// bytes beyond the pointer.
template <int kOffset>
__device__ __forceinline__ void load_l2_16(float (&v)[4], const char* pointer) {
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4 + %5];"
                 : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                 : "l"(pointer), "n"(kOffset)
                 : "memory");
}

template <int kOffset>
__device__ __forceinline__ void load_l2_16(int (&v)[4], const char* pointer) {
    asm volatile("ld.global.cg.v4.s32 {%0, %1, %2, %3}, [%4 + %5];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "l"(pointer), "n"(kOffset)
                 : "memory");
}

__device__ __forceinline__ float from_bits(u32 bits, float) { return __uint_as_float(bits); }
__device__ __forceinline__ int from_bits(u32 bits, int) { return static_cast<int>(bits); }
__device__ __forceinline__ u32 to_bits(float v) { return __float_as_uint(v); }
__device__ __forceinline__ u32 to_bits(int v) { return static_cast<u32>(v); }

// Fragments that a warp gives away while it and `warps` - 1 others add theirs: half of what it holds, or the last.
__device__ constexpr int exchanged_fragments(int fragments, int warps) {
    return warps == 1 ? 0 : max_of(1, fragments / 2) + exchanged_fragments(max_of(1, fragments / 2), warps / 2);
}

// Sum                float or int
// T                  element type of y
// kBlockM, kBlockN   tokens and features of the CTA's tile
// kWarpsK            warps along k, neighbours, whose sums are added
// kStrips, kTokens   16-feature strips and n8 columns of tokens of a warp: powers of two
// kVector            features stored at once: 4 when N % 4 == 0, else 1
template <class Sum, class T, int kThreads, int kBlockM, int kBlockN, int kWarpsK, int kStrips, int kTokens,
          int kVector>
struct Epilogue {
    static constexpr int kFragments = kStrips * kTokens;  // accumulator fragments of a warp
    using Fragments = Sum[kFragments][4];                 // [strip * kTokens + column of tokens]

    // After the sum over warps along k the first kHolders of them hold kOwn whole fragments each.
    static constexpr int kHolders = min_of(kWarpsK, kFragments);
    static constexpr int kOwn = kFragments / kHolders;
    static constexpr int kAtOnce = min_of(kOwn, 16);  // fragments of a lane that wait for memory together

    static_assert((kFragments & (kFragments - 1)) == 0 && (kWarpsK & (kWarpsK - 1)) == 0, "halves of halves");

    // Shared memory: what the warps exchange, the finished tile, the arrival flag. Four words of padding put the four
    // token pairs of a fragment into different banks.
    static constexpr int kPitch = kBlockN + 4;
    static constexpr int kTileAt = kThreads / kWarpSize * exchanged_fragments(kFragments, kWarpsK) * 512;
    static constexpr int kFlagAt = kTileAt + kBlockM * kPitch * 4;
    static constexpr int kSharedBytes = kFlagAt + 16;
    static constexpr int kTileBytes = kBlockM * kBlockN * 4;

    // The calling lane: its warp's place along k, and where the warp's fragments begin in the tile.
    struct Place {
        u32 lane, warp, warp_k, feature, token;
    };

    // Where a tile's results go. scale(token, feature, sum) -> float turns a finished sum into a value of y, before the
    // bias.
    template <class Scale>
    struct Target {
        u16* y;
        const u16* bias;
        int m0, n0, m, n;
        Scale scale;

        // Four features of one token; `out` is where they go.
        __device__ __forceinline__ void store(u16* out, int token, int feature, const Vec16& sums) const {
            float v[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const bool inside = kVector == 4 || feature + i < n;
                v[i] = inside ? scale(token, feature + i, from_bits(sums.w[i], Sum(0))) : 0.0f;
                if (bias != nullptr && inside) v[i] += T::to_float(bias[feature + i]);
            }
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
    };

    // All threads call the next two; both leave `shared` free to be reused and take it as such.

    // The tile's sums are complete in this CTA.
    template <class Scale>
    __device__ __forceinline__ static void finish(char* shared, Fragments& sums, const Place& place,
                                                  const Target<Scale>& target) {
        reduce(sums, shared, place);
        if (place.warp_k < kHolders) {
#pragma unroll
            for (int i = 0; i < kOwn; ++i) put(shared, place, i, sums[i]);
        }
        store(shared, target);
    }

    // `count` CTAs hold parts of the tile's sums, this one part `mine`. Parts are kept in `partials`, a tile's bytes
    // each: part 0 in slot `first`, part i > 0 in slot `rest` + i. `arrival` counts the parts that are written; zero
    // before and after.
    template <class Scale>
    __device__ __forceinline__ static void combine(char* shared, Fragments& sums, const Place& place, u32* partials,
                                                   u32* arrival, u32 mine, u32 count, u32 first, u32 rest,
                                                   const Target<Scale>& target) {
        reduce(sums, shared, place);
        // A part holds fragments as the lanes do, lanes of the same tokens side by side: where M is less than eight, the
        // lanes that hold rows past M leave whole sectors untouched.
        const u32 pair = place.lane % 4, group = place.warp / kWarpsK;
        const bool holds =
            place.warp_k < kHolders && (kBlockM > 8 || static_cast<int>(2 * pair) < target.m - target.m0);
        char* parts = reinterpret_cast<char*>(partials) + (group * kHolders + place.warp_k) * (kOwn * 512) +
                      (pair * 8 + place.lane / 4) * 16;
        const auto part_at = [&](u32 slot) { return parts + static_cast<u64>(slot) * kTileBytes; };
        if (holds) {
            char* own = part_at(mine == 0 ? first : rest + mine);
#pragma unroll
            for (int i = 0; i < kOwn; ++i) *reinterpret_cast<uint4*>(own + i * 512) = bits_of(sums[i]);
        }
        // Release: every thread's partial sums are in L2 before the CTA counts itself as arrived.
        __threadfence();
        __syncthreads();
        u32* flag = reinterpret_cast<u32*>(shared + kFlagAt);
        // Counts to `count` and wraps to zero by itself, ready for the next launch: a plain store would race.
        if (threadIdx.x == 0) *flag = atomicInc(arrival, count - 1);
        __syncthreads();
        if (*flag != count - 1) {
            __syncthreads();  // the flag has been read
            return;
        }
        __threadfence();  // acquire: after the last arrival, the others' partial sums
        if (holds) {
            for_each<kOwn / kAtOnce>([&](auto batch) {
                constexpr int kFirst = decltype(batch)::value * kAtOnce;
                Sum total[kAtOnce][4];
                for_each<kAtOnce>([&](auto i) {
                    constexpr int kFragment = decltype(i)::value;
                    load_l2_16<(kFirst + kFragment) * 512>(total[kFragment], part_at(first));
                });
                for (u32 part = 1; part < count; ++part) {
                    for_each<kAtOnce>([&](auto i) {
                        constexpr int kFragment = decltype(i)::value;
                        Sum more[4];
                        load_l2_16<(kFirst + kFragment) * 512>(more, part_at(rest + part));
                        add(total[kFragment], more);
                    });
                }
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) put(shared, place, kFirst + i, total[i]);
            });
        }
        store(shared, target);
    }

    // Split-K: every tile has `splits` CTAs. partials: [tiles][splits] parts; arrivals: [tiles].
    template <class Scale>
    __device__ __forceinline__ static void run(char* shared, Fragments& sums, const Place& place, u32* partials,
                                               u32* arrivals, u32 tile, u32 split, u32 splits,
                                               const Target<Scale>& target) {
        if (splits == 1) {
            finish(shared, sums, place, target);
        } else {
            combine(shared, sums, place, partials, arrivals + tile, split, splits, tile * splits, tile * splits,
                    target);
        }
    }

private:
    // Adds the fragments of the kWarpsK warps, two by two, four by four, ...: each gives its partner half of what it
    // holds and adds the other half, so that a sum is spread over the warps. With a single fragment left the upper
    // partner gives it away. A sum of two does not depend on their order.
    template <int kCount = kFragments, int kBit = 1, int kAt = 0>
    __device__ __forceinline__ static void reduce(Fragments& sums, char* shared, const Place& place) {
        if constexpr (kBit < kWarpsK) {
            constexpr bool kHalves = kCount > 1;
            constexpr int kGiven = kHalves ? kCount / 2 : 1;
            const bool upper = (place.warp_k & kBit) != 0;
            char* given = shared + kAt + place.warp * (kGiven * 512) + place.lane * 16;
            char* taken = shared + kAt + (place.warp ^ kBit) * (kGiven * 512) + place.lane * 16;
            if (upper) {
#pragma unroll
                for (int i = 0; i < kGiven; ++i) *reinterpret_cast<uint4*>(given + i * 512) = bits_of(sums[i]);
            } else if constexpr (kHalves) {
#pragma unroll
                for (int i = 0; i < kGiven; ++i) *reinterpret_cast<uint4*>(given + i * 512) = bits_of(sums[kGiven + i]);
            }
            __syncthreads();
            if (!upper) {
#pragma unroll
                for (int i = 0; i < kGiven; ++i) add(sums[i], load_16(taken + i * 512));
            } else if constexpr (kHalves) {
#pragma unroll
                for (int i = 0; i < kGiven; ++i) {
                    add(sums[kGiven + i], load_16(taken + i * 512));
#pragma unroll
                    for (int c = 0; c < 4; ++c) sums[i][c] = sums[kGiven + i][c];
                }
            }
            constexpr int kWarps = kThreads / kWarpSize;
            reduce<kGiven, kBit * 2, kAt + kWarps * kGiven * 512>(sums, shared, place);
        }
    }

    // The first fragment that a warp holds after `reduce`.
    __device__ __forceinline__ static u32 first_fragment(u32 warp_k) {
        u32 first = 0;
#pragma unroll
        for (int bit = 1; bit < kHolders; bit *= 2) first += (warp_k & bit) != 0 ? kFragments / 2 / bit : 0;
        return first;
    }

    // Writes the i-th fragment that the warp holds to the finished tile.
    __device__ __forceinline__ static void put(char* shared, const Place& place, int i, const Sum (&d)[4]) {
        const u32 first = first_fragment(place.warp_k);
        const u32 feature = place.feature + first / kTokens * 16, token = place.token + first % kTokens * 8;
        Sum* at = reinterpret_cast<Sum*>(shared + kTileAt) + (token + 2 * (place.lane % 4)) * kPitch + feature +
                  place.lane / 4 + i % kTokens * 8 * kPitch + i / kTokens * 16;
        at[0] = d[0];
        at[kPitch] = d[1];
        at[8] = d[2];
        at[kPitch + 8] = d[3];
    }

    // Stores the finished tile, four features a lane: whole sectors.
    template <class Scale>
    __device__ __forceinline__ static void store(const char* shared, const Target<Scale>& target) {
        constexpr int kLanesPerRow = kBlockN / 4, kRows = kThreads / kLanesPerRow;  // kRows tokens at a time
        static_assert(kThreads % kLanesPerRow == 0, "threads take whole rows of the tile");
        const int token = static_cast<int>(threadIdx.x) / kLanesPerRow;
        const int feature = static_cast<int>(threadIdx.x) % kLanesPerRow * 4;
        const int rest = target.n0 + feature < target.n ? min(kBlockM, target.m - target.m0) - token : 0;
        const char* from = shared + kTileAt + (token * kPitch + feature) * 4;
        u16* out = target.y + static_cast<long long>(target.m0 + token) * target.n + target.n0 + feature;
        const long long row_step = static_cast<long long>(target.n) * kRows;
        __syncthreads();
#pragma unroll
        for (int row = 0; row < kBlockM; row += kRows) {
            if (row >= rest) break;
            target.store(out, target.m0 + token + row, target.n0 + feature, load_16(from + row * (kPitch * 4)));
            out += row_step;
        }
        __syncthreads();
    }

    __device__ __forceinline__ static uint4 bits_of(const Sum (&v)[4]) {
        return make_uint4(to_bits(v[0]), to_bits(v[1]), to_bits(v[2]), to_bits(v[3]));
    }

    __device__ __forceinline__ static void add(Sum (&sum)[4], const Sum (&more)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] += more[i];
    }

    __device__ __forceinline__ static void add(Sum (&sum)[4], const Vec16& v) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] += from_bits(v.w[i], Sum(0));
    }
};
