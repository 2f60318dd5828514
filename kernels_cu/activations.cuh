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
    static constexpr int kPieces = kRows * kColumns;
    static constexpr int kPasses = ceil_div(kPieces, kThreads);
    static constexpr int kRowStep = kThreads / kColumns;  // rows between two passes of a thread

    static_assert(kColumns == 4 || kColumns % 8 == 0, "a row of activations is 64 bytes or a multiple of 128");
    static_assert(kThreads % kColumns == 0, "a thread must stay in one column over its passes");

    __device__ __forceinline__ static int swizzle(int row) { return kColumns >= 8 ? row & 7 : (row >> 1) & 3; }

    const char* from[kPasses];  // this thread's piece of the next tile, pass by pass
    u32 target;                 // shared offset of its first piece
    int left;                   // elements of K from its column in the next tile on
    Copy16 pieces[kPasses];

    // `x` is the tile's first row, k0 its first k; rows past `rows` repeat the last, and their results are never stored.
    __device__ __forceinline__ ActivationTile(const void* x, int rows, int k, int k0, int row_stride) {
        const int thread = static_cast<int>(threadIdx.x);
        const int row = thread / kColumns, column = thread % kColumns;
        const int at = k0 + column * (16 / kElementBytes);
        left = k - at;
        target = row * kRowBytes + ((column ^ swizzle(row)) * 16);
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
            const long long r = min(row + i * kRowStep, rows - 1);
            from[i] = static_cast<const char*>(x) + (r * row_stride + at) * kElementBytes;
        }
    }

    // Rows a whole number of swizzle periods apart keep their permutation, so passes differ by a constant.
    __device__ __forceinline__ u32 pass_target(int i) const {
        if constexpr (kRowStep % 8 == 0) return target + i * kRowStep * kRowBytes;
        const int row = static_cast<int>(threadIdx.x) / kColumns + i * kRowStep;
        const int column = static_cast<int>(threadIdx.x) % kColumns;
        return row * kRowBytes + ((column ^ swizzle(row)) * 16);
    }

    // Starts the copy of the next tile to `shared` and steps on; `land` ends it. k past K is filled with zeros.
    __device__ __forceinline__ void fetch(u32 shared) {
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
            if (idle(i)) break;
            const u32 to = shared + pass_target(i);
            if constexpr (!kAligned) {
                pieces[i].put(to, gather(from[i]));
            } else if (kWhole || left > 0) {
                pieces[i].fetch(to, from[i]);
            } else {
                pieces[i].put(to, Vec16{{0u, 0u, 0u, 0u}});
            }
            from[i] += kRowBytes;
        }
        left -= kRowBytes / kElementBytes;
    }

    __device__ __forceinline__ void land(u32 shared) const {
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
            if (idle(i)) break;
            pieces[i].land(shared + pass_target(i));
        }
    }

    __device__ __forceinline__ static bool idle(int pass) {
        return kPieces % kThreads != 0 && static_cast<int>(threadIdx.x) + pass * kThreads >= kPieces;
    }

    // A piece of a row that is not 16-byte aligned, element by element.
    __device__ __forceinline__ Vec16 gather(const char* at) const {
        Vec16 v = {{0u, 0u, 0u, 0u}};
#pragma unroll
        for (int e = 0; e < 16 / kElementBytes; ++e) {
            if (e >= left) break;
            const u32 bits = kElementBytes == 2 ? u32(reinterpret_cast<const u16*>(at)[e])
                                                : u32(reinterpret_cast<const u8*>(at)[e]);
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
        __device__ __forceinline__ Fragments(u32 shared, u32 lane_at, int step0) {
            // The swizzle is an XOR within 128 bytes, and tiles start at multiples of 128: so is stepping.
            const u32 base = shared + lane_at + (step0 / 4) * 128;
#pragma unroll
            for (int i = 0; i < (kPairs ? 4 : 2); ++i) at[i] = base ^ ((step0 % 4 + i * (kPairs ? 1 : 2)) % 4 * 32);
        }

        // The part of a lane's address that does not change: compute it once.
        __device__ __forceinline__ static u32 lane_address(int lane, int token) {
            const int row = (lane & 7) + (kPairs ? (lane >> 4) * 8 : 0);
            const int column = kPairs ? (lane >> 3) & 1 : lane >> 3;
            return (token + row) * kRowBytes + ((column ^ swizzle(row)) * 16);
        }

        // Makes the fragments of `step` (counted from step0) available.
        __device__ __forceinline__ void load(int step) {
            if constexpr (kPairs) {
#pragma unroll
                for (int j = 0; j < kTokens; j += 2) {
                    u32 v[4];
                    load_matrix_x4(v, at[step % 4] + j * 8 * kRowBytes + (step / 4) * 128);
                    b[j][0] = v[0], b[j][1] = v[1], b[j + 1][0] = v[2], b[j + 1][1] = v[3];
                }
            } else if (step % 2 == 0) {
#pragma unroll
                for (int j = 0; j < kTokens; ++j) {
                    load_matrix_x4(b[j], at[step / 2 % 2] + j * 8 * kRowBytes + (step / 4) * 128);
                }
            }
        }

        __device__ __forceinline__ u32 low(int j, int step) const { return b[j][kPairs ? 0 : step % 2 * 2]; }
        __device__ __forceinline__ u32 high(int j, int step) const { return b[j][kPairs ? 1 : step % 2 * 2 + 1]; }
    };
};
