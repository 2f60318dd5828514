// A tile of activations in shared memory: kRows tokens x kRowBytes bytes of k, filled by all threads of a CTA and read
// as B fragments with ldmatrix.
//
// The 16-byte columns of row r are permuted by XOR with the low bits of r, so that the eight rows that one ldmatrix
// phase reads at the same column lie in eight different groups of four banks.
#pragma once

template <int kThreads, int kRows, int kRowBytes, int kElementBytes, bool kAligned>
struct ActivationTile {
    static constexpr int kColumns = kRowBytes / 16;  // 16-byte pieces of a row
    static constexpr int kBytes = kRows * kRowBytes;
    static constexpr int kPieces = kRows * kColumns;
    static constexpr int kPasses = ceil_div(kPieces, kThreads);
    static constexpr int kRowStep = kThreads / kColumns;  // rows between two passes of a thread

    static_assert(kColumns == 4 || kColumns % 8 == 0, "a row of activations is 64 bytes or a multiple of 128");
    static_assert(kThreads % kColumns == 0, "a thread must stay in one column over its passes");

    __device__ __forceinline__ static int swizzle(int row) { return kColumns >= 8 ? row & 7 : (row >> 1) & 3; }

    const char* source;       // row 0 of the tile at this thread's column
    int offsets[kPasses];     // bytes from `source` to this thread's row of each pass
    u32 target;               // shared offset of this thread's first piece
    int column_k;             // first k of this thread's column in the tile
    int k;                    // K of the problem

    // `x` points at the tile's first row; rows past `rows` repeat the last one, and their results are never stored.
    __device__ __forceinline__ ActivationTile(const void* x, int rows, int k_, int row_stride, int thread) : k(k_) {
        const int row = thread / kColumns, column = thread % kColumns;
        source = static_cast<const char*>(x) + column * 16;
        column_k = column * (16 / kElementBytes);
        target = row * kRowBytes + ((column ^ swizzle(row)) * 16);
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
            const int r = row + i * kRowStep;
            offsets[i] = (r < rows ? r : rows - 1) * row_stride * kElementBytes;
        }
    }

    // Rows a whole number of swizzle periods apart keep their permutation, so passes differ by a constant.
    __device__ __forceinline__ u32 pass_target(int i) const {
        if constexpr (kRowStep % 8 == 0) return target + i * kRowStep * kRowBytes;
        const int row = static_cast<int>(threadIdx.x) / kColumns + i * kRowStep;
        const int column = static_cast<int>(threadIdx.x) % kColumns;
        return row * kRowBytes + ((column ^ swizzle(row)) * 16);
    }

    // Starts the copy of the tile whose first k is k0 to `shared`. k past K is filled with zeros.
    __device__ __forceinline__ void copy(u32 shared, int k0) const {
        const char* from = source + static_cast<long long>(k0) * kElementBytes;
        const bool inside = k0 + column_k < k;
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
            if (kPieces % kThreads != 0 && static_cast<int>(threadIdx.x) + i * kThreads >= kPieces) break;
            if constexpr (kAligned) {
                // Never name an address past the array, even for a copy of zero bytes.
                copy_async_16_or_zero(shared + pass_target(i), inside ? from + offsets[i] : source, inside ? 16 : 0);
            } else {
                copy_elements(shared + pass_target(i), from + offsets[i], k0 + column_k);
            }
        }
    }

    // Rows that are not 16-byte aligned: element by element, visible to the others after the next barrier.
    __device__ __forceinline__ void copy_elements(u32 shared, const char* from, int first_k) const {
#pragma unroll
        for (int e = 0; e < 16 / kElementBytes; ++e) {
            const bool inside = first_k + e < k;
            if constexpr (kElementBytes == 2) {
                store_shared_2(shared + 2 * e, inside ? reinterpret_cast<const u16*>(from)[e] : u16(0));
            } else {
                store_shared_1(shared + e, inside ? reinterpret_cast<const u8*>(from)[e] : 0u);
            }
        }
    }

    // Shared offset that a lane gives to ldmatrix for the four 16-byte columns from column 4 * half of the first eight
    // rows. Other rows and columns are constants away: see `fragment_offset`.
    __device__ __forceinline__ static u32 lane_offset(int lane, int half) {
        const int row = lane & 7, column = 4 * half + (lane >> 3);
        return row * kRowBytes + ((column ^ swizzle(row)) * 16);
    }

    // Bytes to add to lane_offset(lane, quad % 2) for the token group (eight rows) and the quad of 16-byte columns.
    __device__ __forceinline__ static constexpr int fragment_offset(int group, int quad) {
        return group * 8 * kRowBytes + (quad / 2) * 128;
    }
};
