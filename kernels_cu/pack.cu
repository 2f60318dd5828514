// Codes as checkpoints and quantizers have them, w[K, N] with a byte a code, -> packed units (cupyq/layout.py): reads
// each code and writes each word once.
//
// A warp packs one unit's k of eight strips (128 features) by itself, so that no barrier is needed:
//
//     codes, kUnitK rows of 128 bytes   --16 bytes a lane-->   shared memory   --16 bytes a lane-->   registers
//     a lane then has, for its t and one strip, the row (g = 0..15) of each of its k: it puts codes of one byte of the
//     result together, turns 4 x 4 bytes round, and holds the four words of eight lanes, stored 16 bytes at a time.
#include "types.cuh"
#include "ptx.cuh"

// kBits      bits of a weight: 2, 4, 8
// kWide      8-bit activations: units of m16n8k32 instead of m16n8k16
// kWarps     warps of a CTA, one unit each, one after the other along k
// kVector    features loaded at once: 16, 4 (rows that start at a multiple of 4 bytes) or 1
template <int kBits, bool kWide, int kWarps, int kVector>
struct Pack {
    static_assert(kBits == 2 || kBits == 4 || kBits == 8, "codes of 2, 4 or 8 bits");
    static_assert(!kWide || kBits == 8, "weights for 8-bit activations have 8 bits");
    static_assert(kVector == 16 || kVector == 4 || kVector == 1, "rows are read 16, 4 or 1 bytes at a time");
    static constexpr int kThreads = kWarps * kWarpSize;
    static constexpr int kUnitK = 256 / kBits;
    static constexpr int kStrips = 8, kColumns = 16 * kStrips;
    // 16-byte pieces of a row. Eight lanes that read at once hold four strips and two values of t, whose rows lie 2 (4
    // with 8-bit activations) apart: the pitch puts these four pieces apart, modulo the eight that fill the banks.
    static constexpr int kPitch = kWide ? kStrips + 1 : kStrips + 2;
    static constexpr int kWarpPieces = kUnitK * kPitch;
    static constexpr int kSharedBytes = kWarps * kWarpPieces * 16;

    struct Arguments {
        const u8* codes;     // (K, N), rows `row_stride` bytes apart
        const int* perm;     // (K,) row of `codes` that packed row i takes; null: row i
        const u8* last_row;  // (N,) codes of the rows from K on; null: `pad`
        uint4* packed;
        int n, k, row_stride;
        u32 pad;  // code of features from N on, in each byte
    };

    __device__ __forceinline__ static void run(const Arguments& a) {
        extern __shared__ __align__(128) uint4 tiles[];
        const int lane = static_cast<int>(threadIdx.x) % kWarpSize, warp = static_cast<int>(threadIdx.x) / kWarpSize;
        const int units = ceil_div(a.k, kUnitK), blocks_k = ceil_div(units, kWarps);
        const int unit = static_cast<int>(blockIdx.x) % blocks_k * kWarps + warp;
        const int first_strip = static_cast<int>(blockIdx.x) / blocks_k * kStrips;
        if (unit >= units) return;
        uint4* tile = tiles + warp * kWarpPieces;
        load(a, tile, unit * kUnitK, first_strip * 16, lane);
        __syncwarp();
        // Lanes that read together: four strips, then t, then the other four strips.
        const int strip = lane % 4 + lane / 16 * 4, t = lane / 4 % 4;
        u32 words[8][4];
        gather(words, tile + strip, t);
        if ((first_strip + strip) * 16 >= a.n) return;
        uint4* to = a.packed + (static_cast<long long>(first_strip + strip) * units + unit) * kWarpSize + t;
#pragma unroll
        for (int g = 0; g < 8; ++g) to[4 * g] = make_uint4(words[g][0], words[g][1], words[g][2], words[g][3]);
    }

    // Rows k0 to k0 + kUnitK, columns n0 to n0 + 128, into shared memory: whole 128-byte lines where N allows it.
    __device__ __forceinline__ static void load(const Arguments& a, uint4* tile, int k0, int n0, int lane) {
        constexpr int kAcross = kColumns / kVector, kPieces = kUnitK * kAcross / kWarpSize;
        // Loads of a lane in flight: 4 KiB a warp.
        constexpr int kAtOnce = 8;
        static_assert(kPieces % kAtOnce == 0, "the loads of a unit come in whole batches");
#pragma unroll 1
        for (int first = 0; first < kPieces; first += kAtOnce) {
            Piece held[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int piece = (first + i) * kWarpSize + lane;
                held[i] = fetch(a, k0 + piece / kAcross, n0 + piece % kAcross * kVector);
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int piece = (first + i) * kWarpSize + lane;
                u8* row = reinterpret_cast<u8*>(tile + piece / kAcross * kPitch);
                *reinterpret_cast<Piece*>(row + piece % kAcross * kVector) = held[i];
            }
        }
    }

    template <int kBytes, class Unused = void>
    struct PieceOf {
        using Type = uint4;
    };
    template <class Unused>
    struct PieceOf<4, Unused> {
        using Type = u32;
    };
    template <class Unused>
    struct PieceOf<1, Unused> {
        using Type = u8;
    };
    using Piece = typename PieceOf<kVector>::Type;

    __device__ __forceinline__ static Piece fetch(const Arguments& a, int row, int column) {
        Piece value;
        if constexpr (kVector == 16) {
            value = make_uint4(a.pad, a.pad, a.pad, a.pad);
        } else {
            value = static_cast<Piece>(a.pad);
        }
        // N is a multiple of kVector, so a piece has all of its features or none.
        if (column >= a.n) return value;
        if (row < a.k) {
            const int from = a.perm == nullptr ? row : a.perm[row];
            value = *reinterpret_cast<const Piece*>(a.codes + static_cast<long long>(from) * a.row_stride + column);
        } else if (a.last_row != nullptr) {
            value = *reinterpret_cast<const Piece*>(a.last_row + column);
        }
        return value;
    }

    // words[g][j]: word j of lane 4 g + t.
    __device__ __forceinline__ static void gather(u32 (&words)[8][4], const uint4* column, int t) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            u32 bytes[2][4];  // byte i of the words of four g: [g / 4][i]
            if constexpr (kWide) {
                // Word h + 2 q: byte e is row g + 8 h, k 16 q + 4 t + e.
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const uint4 codes = column[(16 * (j >> 1) + 4 * t + e) * kPitch];
                    halves(bytes, e, codes, j & 1);
                }
            } else {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const uint4* at = column + (kUnitK / 4 * j + 2 * t + e) * kPitch;
                    if constexpr (kBits == 8) {  // byte 2 h + e
                        const uint4 codes = *at;
                        halves(bytes, e, codes, 0);
                        halves(bytes, e + 2, codes, 1);
                    } else if constexpr (kBits == 4) {  // nibble h of byte q + 2 e
#pragma unroll
                        for (int q = 0; q < 2; ++q) {
                            const uint4 codes = at[8 * q * kPitch];
                            bytes[0][q + 2 * e] = codes.x | codes.z << 4;
                            bytes[1][q + 2 * e] = codes.y | codes.w << 4;
                        }
                    } else {  // pair h + 2 q of byte p + 2 e
#pragma unroll
                        for (int p = 0; p < 2; ++p) {
                            const uint4 low = at[16 * p * kPitch], high = at[(16 * p + 8) * kPitch];
                            bytes[0][p + 2 * e] = low.x | low.z << 2 | high.x << 4 | high.z << 6;
                            bytes[1][p + 2 * e] = low.y | low.w << 2 | high.y << 4 | high.w << 6;
                        }
                    }
                }
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const u32(&b)[4] = bytes[half];
                const u32 low01 = permute_bytes(b[0], b[1], 0x5140), low23 = permute_bytes(b[2], b[3], 0x5140);
                const u32 high01 = permute_bytes(b[0], b[1], 0x7362), high23 = permute_bytes(b[2], b[3], 0x7362);
                words[4 * half][j] = permute_bytes(low01, low23, 0x5410);
                words[4 * half + 1][j] = permute_bytes(low01, low23, 0x7632);
                words[4 * half + 2][j] = permute_bytes(high01, high23, 0x5410);
                words[4 * half + 3][j] = permute_bytes(high01, high23, 0x7632);
            }
        }
    }

    // Byte i of eight words from rows 8 h to 8 h + 7 of a strip.
    __device__ __forceinline__ static void halves(u32 (&bytes)[2][4], int i, const uint4& codes, int h) {
        bytes[0][i] = h == 0 ? codes.x : codes.z;
        bytes[1][i] = h == 0 ? codes.y : codes.w;
    }
};
