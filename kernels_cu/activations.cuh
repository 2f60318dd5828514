// A tile of activations in shared memory: kRows tokens x kRowBytes bytes of k, filled by all threads of a CTA and read
// as B fragments with ldmatrix.
//
// The 16-byte columns of row r are permuted by XOR with the low bits of r, so that the eight rows that one ldmatrix
// phase reads at the same column lie in eight different groups of four banks.
#pragma once

// kThreads       threads of the CTA
// kRows          tokens
// kRowBytes      bytes of k in a row: 64 or a multiple of 128
// kElementBytes  bytes of an element: 2 or 1
// kAligned       rows of x start at multiples of 16 bytes and hold whole 16-byte pieces
// kWhole         K is a multiple of the tile's k: nothing to fill with zeros
template <int kThreads, int kRows, int kRowBytes, int kElementBytes, bool kAligned, bool kWhole>
struct ActivationTile {
    static constexpr int kColumns = kRowBytes / 16;  // 16-byte pieces of a row
    static constexpr int kBytes = kRows * kRowBytes;

    static_assert(kColumns == 4 || kColumns % 8 == 0, "a row of activations is 64 bytes or a multiple of 128");
    static_assert(kRows % 8 == 0, "a tile holds whole periods of the swizzle");

    // Who copies what: kRun neighbouring threads copy a run of pieces, up to 128 bytes of a row. Threads first spread over
    // the rows, then over the runs of a row; what is left they do in passes, down the rows and along them. Rows of a
    // thread's passes are whole swizzle periods apart and runs whole 128 bytes, so that passes differ by constants.
    static constexpr int kRun = min_of(kColumns, 8);
    static constexpr int kRuns = kColumns / kRun;
    static constexpr int kRunners = kThreads / kRun;
    static constexpr int kRowSpread = min_of(kRows, kRunners / 8 * 8);
    static constexpr int kRunSpread = min_of(kRuns, kRunners / kRowSpread);
    static constexpr int kRowPasses = ceil_div(kRows, kRowSpread);
    static constexpr int kRunPasses = ceil_div(kRuns, kRunSpread);

    static_assert(kRunners >= 8, "at least 64 threads copy, or 32 where rows are short");

    __device__ __forceinline__ static u32 swizzle(u32 row) { return kColumns >= 8 ? row & 7 : (row >> 1) & 3; }

    const char* from[kRowPasses];  // this thread's first piece of the next tile, by row pass
    u32 target;                    // shared offset of its first piece
    int left;                      // elements of K from its first column in the next tile on
    u32 row, run;                  // its first row and run
    Copy16 pieces[kRowPasses * kRunPasses];

    // `x` is the tile's first row, k0 its first k; rows past `rows` repeat the last, and their results are never stored.
    __device__ __forceinline__ ActivationTile(const void* x, int rows, int k, int k0, int row_stride) {
        const u32 thread = threadIdx.x, runner = thread / kRun;
        row = runner % kRowSpread;
        run = runner / kRowSpread;
        const u32 column = run * kRun + thread % kRun;
        const u32 at = k0 + column * (16 / kElementBytes);
        left = k - static_cast<int>(at);
        target = kept(row * kRowBytes + ((column ^ swizzle(row)) * 16));
        const char* first = at_row(static_cast<const char*>(x), at, kElementBytes);
#pragma unroll
        for (int i = 0; i < kRowPasses; ++i) {
            from[i] = at_row(first, min(row + i * kRowSpread, u32(rows - 1)), u32(row_stride) * kElementBytes);
        }
    }

    // Starts the copy of the next tile to `shared` and steps on; `land` ends it. k past K is filled with zeros.
    __device__ __forceinline__ void fetch(u32 shared) {
        const u32 to = shared + target;
        for_each<kRowPasses * kRunPasses>([&](auto index) {
            constexpr int kIndex = decltype(index)::value, kRowPass = kIndex / kRunPasses;
            constexpr int kRunPass = kIndex % kRunPasses;
            constexpr int kTo = kRowPass * kRowSpread * kRowBytes + kRunPass * kRunSpread * 128;
            constexpr int kFrom = kRunPass * kRunSpread * 128;
            if (!busy(kRowPass, kRunPass)) return;
            const int rest = left - kFrom / kElementBytes;
            if constexpr (!kAligned) {
                pieces[kIndex].put(to + kTo, gather(from[kRowPass] + kFrom, rest));
            } else if (kWhole || rest > 0) {
                pieces[kIndex].template fetch<kTo, kFrom>(to, from[kRowPass]);
            } else {
                pieces[kIndex].put(to + kTo, Vec16{{0u, 0u, 0u, 0u}});
            }
        });
#pragma unroll
        for (int i = 0; i < kRowPasses; ++i) from[i] += kRowBytes;
        left -= kRowBytes / kElementBytes;
    }

    __device__ __forceinline__ void land(u32 shared) const {
        for_each<kRowPasses * kRunPasses>([&](auto index) {
            constexpr int kIndex = decltype(index)::value, kRowPass = kIndex / kRunPasses;
            constexpr int kRunPass = kIndex % kRunPasses;
            constexpr int kTo = kRowPass * kRowSpread * kRowBytes + kRunPass * kRunSpread * 128;
            if (busy(kRowPass, kRunPass)) pieces[kIndex].land(shared + target + kTo);
        });
    }

    // Whether this thread has a piece in a pass; known when the kernel is compiled where the passes come out even.
    __device__ __forceinline__ bool busy(int row_pass, int run_pass) const {
        return (kRows % kRowSpread == 0 || row + row_pass * kRowSpread < kRows) &&
               (kRunSpread * kRowSpread == kRunners ? true : run < kRunSpread) &&
               (kRuns % kRunSpread == 0 || run + run_pass * kRunSpread < kRuns);
    }

    // A piece of a row that is not 16-byte aligned, element by element.
    __device__ __forceinline__ static Vec16 gather(const char* at, int rest) {
        Vec16 v = {{0u, 0u, 0u, 0u}};
#pragma unroll
        for (int e = 0; e < 16 / kElementBytes; ++e) {
            if (e >= rest) break;
            const u32 bits =
                kElementBytes == 2 ? u32(reinterpret_cast<const u16*>(at)[e]) : u32(reinterpret_cast<const u8*>(at)[e]);
            v.w[e * kElementBytes / 4] |= bits << (8 * (e * kElementBytes % 4));
        }
        return v;
    }

    // --- B fragments -------------------------------------------------------------------------------------------------
    //
    // A step is 32 bytes of k, two 16-byte columns: what one mma takes. One ldmatrix.x4 reads two steps of a column of
    // eight tokens, or one step of two columns of tokens, which keeps half as many registers alive.
    template <int kTokens>  // n8 columns of tokens that a warp reads
    struct Fragments {
        static constexpr bool kPairs = kTokens % 2 == 0;

        u32 at[kPairs ? 4 : 2];  // addresses that reach every step of a 128-byte row piece by adding constants
        u32 b[kTokens][kPairs ? 2 : 4];

        // `shared` is the tile; `token` and `step0` the warp's first token (a multiple of 8) and step.
        __device__ __forceinline__ Fragments(u32 shared, u32 lane_at, u32 step0) {
            // The swizzle is an XOR within 128 bytes, and tiles start at multiples of 128: so is stepping.
            const u32 base = shared + lane_at + (step0 / 4) * 128;
#pragma unroll
            for (int i = 0; i < (kPairs ? 4 : 2); ++i) at[i] = base ^ ((step0 % 4 + i * (kPairs ? 1 : 2)) % 4 * 32);
        }

        // The part of a lane's address that does not change: compute it once.
        __device__ __forceinline__ static u32 lane_address(u32 lane, u32 token) {
            const u32 row = (lane & 7) + (kPairs ? (lane >> 4) * 8 : 0);
            const u32 column = kPairs ? (lane >> 3) & 1 : lane >> 3;
            return (token + row) * kRowBytes + ((column ^ swizzle(row)) * 16);
        }

        // Makes the fragments of `step` (counted from step0) available.
        __device__ __forceinline__ void load(int step) {
            const u32 past = (step / 4) * 128;
            if constexpr (kPairs) {
                for_each<kTokens / 2>([&](auto pair) {
                    constexpr int j = 2 * decltype(pair)::value;
                    u32 v[4];
                    load_matrix_x4<j * 8 * kRowBytes>(v, at[step % 4] + past);
                    b[j][0] = v[0], b[j][1] = v[1], b[j + 1][0] = v[2], b[j + 1][1] = v[3];
                });
            } else if (step % 2 == 0) {
                for_each<kTokens>([&](auto token) {
                    constexpr int j = decltype(token)::value;
                    load_matrix_x4<j * 8 * kRowBytes>(b[j], at[step / 2 % 2] + past);
                });
            }
        }

        __device__ __forceinline__ u32 low(int j, int step) const { return b[j][kPairs ? 0 : step % 2 * 2]; }
        __device__ __forceinline__ u32 high(int j, int step) const { return b[j][kPairs ? 1 : step % 2 * 2 + 1]; }
    };
};
