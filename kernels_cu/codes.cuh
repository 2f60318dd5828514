// From packed codes to A fragments of q - z, exact integers in a 16-bit type T. Nothing is scaled here.
//
// A lane's 16 bytes hold whole fragments (cupyq/layout.py): kUnitK of k for 16 features. Register r of a fragment belongs
// to row g + 8 (r & 1); its two codes lie 16 bits apart (2 and 4 bits) or in neighbouring bytes (8 bits), so that one
// mask or byte permutation yields the pair.
//
// All but one of the recipes below put a code into the mantissa of a power of two by OR, 1024 for float16 and 128 for
// bfloat16, which adds q (or q times the weight of its bits), and take the power and the zero point off again: exact.
#pragma once

template <class T, int kBits>
struct Codes;

template <>
struct Codes<Half, 4> {
    static constexpr int kUnitK = 64;

    // For the low nibbles of row g 1024 + z; for the high ones of row g + 8, which arrive sixteenfold, -(64 + z).
    struct Zero {
        u32 low, high;
    };

    __device__ __forceinline__ static Zero symmetric() { return {0x64086408u, 0xd480d480u}; }

    // `pair` holds z of row g in byte 0, of row g + 8 in byte 1.
    __device__ __forceinline__ static Zero zero(u32 pair) {
        Zero zero;  // z of row g in the low half, sixteenfold that of row g + 8 in the high one
        spread_halves(mask_or<0x01f0001fu, 0xd4006400u>(pair * 0x1001u), zero.low, zero.high);
        return zero;
    }

    __device__ __forceinline__ static void fragment(u32 (&a)[4], const uint4& packed, int step, const Zero& zero) {
        const u32 word = word_of(packed, step), next = word >> 8;
        a[0] = Half::sub2(mask_or<0x000f000fu, 0x64006400u>(word), zero.low);
        a[1] = Half::fma2(mask_or<0x00f000f0u, 0x64006400u>(word), 0x2c002c00u, zero.high);  // 1 / 16
        a[2] = Half::sub2(mask_or<0x000f000fu, 0x64006400u>(next), zero.low);
        a[3] = Half::fma2(mask_or<0x00f000f0u, 0x64006400u>(next), 0x2c002c00u, zero.high);
    }
};

template <>
struct Codes<Bfloat16, 4> {
    static constexpr int kUnitK = 64;

    struct Zero {  // -(128 + z) of rows g and g + 8
        u32 low, high;
    };

    __device__ __forceinline__ static Zero symmetric() { return {0xc308c308u, 0xc308c308u}; }

    __device__ __forceinline__ static Zero zero(u32 pair) {
        Zero zero;
        spread_halves(permute_bytes(pair, 0xc3u, 0x4140), zero.low, zero.high);
        return zero;
    }

    // Only the low nibble fits bfloat16's mantissa, so each quarter is shifted down first.
    __device__ __forceinline__ static void fragment(u32 (&a)[4], const uint4& packed, int step, const Zero& zero) {
        const u32 word = word_of(packed, step);
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const u32 biased = mask_or<0x000f000fu, 0x43004300u>(word >> (4 * r));
            a[r] = Bfloat16::fma2(biased, 0x3f803f80u, r & 1 ? zero.high : zero.low);  // times 1.0
        }
    }
};

template <>
struct Codes<Half, 2> {
    static constexpr int kUnitK = 128;

    // One constant a register, whose codes arrive 1, 4, 16 and 64 times as large: 1024 + z, -(256 + z), -(64 + z),
    // -(16 + z); registers 0 and 2 are row g.
    struct Zero {
        u32 r[4];
    };

    __device__ __forceinline__ static Zero symmetric() {
        return {{0x64026402u, 0xdc08dc08u, 0xd420d420u, 0xcc80cc80u}};
    }

    __device__ __forceinline__ static Zero zero(u32 pair) {
        const u32 low = pair & 0xffu, high = pair >> 8;
        return {{low * 0x00010001u + 0x64006400u, high * 0x00040004u + 0xdc00dc00u, low * 0x00100010u + 0xd400d400u,
                 high * 0x00400040u + 0xcc00cc00u}};
    }

    __device__ __forceinline__ static void fragment(u32 (&a)[4], const uint4& packed, int step, const Zero& zero) {
        const u32 word = word_of(packed, step / 2) >> (step % 2 * 8);
        a[0] = Half::sub2(mask_or<0x00030003u, 0x64006400u>(word), zero.r[0]);
        a[1] = Half::fma2(mask_or<0x000c000cu, 0x64006400u>(word), 0x34003400u, zero.r[1]);  // 1 / 4
        a[2] = Half::fma2(mask_or<0x00300030u, 0x64006400u>(word), 0x2c002c00u, zero.r[2]);  // 1 / 16
        a[3] = Half::fma2(mask_or<0x00c000c0u, 0x64006400u>(word), 0x24002400u, zero.r[3]);  // 1 / 64
    }
};

template <>
struct Codes<Bfloat16, 2> {
    static constexpr int kUnitK = 128;

    // -(128 + z), -(32 + z), -(8 + z), -(128 + z): the fourth pair would not fit the mantissa and is shifted down.
    struct Zero {
        u32 r[4];
    };

    __device__ __forceinline__ static Zero symmetric() {
        return {{0xc302c302u, 0xc208c208u, 0xc120c120u, 0xc302c302u}};
    }

    __device__ __forceinline__ static Zero zero(u32 pair) {
        const u32 low = pair & 0xffu, high = pair >> 8;
        return {{low * 0x00010001u + 0xc300c300u, high * 0x00040004u + 0xc200c200u, low * 0x00100010u + 0xc100c100u,
                 high * 0x00010001u + 0xc300c300u}};
    }

    __device__ __forceinline__ static void fragment(u32 (&a)[4], const uint4& packed, int step, const Zero& zero) {
        const u32 word = word_of(packed, step / 2) >> (step % 2 * 8);
        a[0] = Bfloat16::fma2(mask_or<0x00030003u, 0x43004300u>(word), 0x3f803f80u, zero.r[0]);  // 1
        a[1] = Bfloat16::fma2(mask_or<0x000c000cu, 0x43004300u>(word), 0x3e803e80u, zero.r[1]);  // 1 / 4
        a[2] = Bfloat16::fma2(mask_or<0x00300030u, 0x43004300u>(word), 0x3d803d80u, zero.r[2]);  // 1 / 16
        a[3] = Bfloat16::fma2(mask_or<0x00030003u, 0x43004300u>(word >> 6), 0x3f803f80u, zero.r[3]);
    }
};

template <>
struct Codes<Half, 8> {
    static constexpr int kUnitK = 32;

    struct Zero {  // 1024 + z of rows g and g + 8
        u32 low, high;
    };

    __device__ __forceinline__ static Zero symmetric() { return {0x64806480u, 0x64806480u}; }

    __device__ __forceinline__ static Zero zero(u32 pair) {
        return {permute_bytes(pair, 0x64u, 0x4040), permute_bytes(pair, 0x64u, 0x4141)};
    }

    __device__ __forceinline__ static void fragment(u32 (&a)[4], const uint4& packed, int step, const Zero& zero) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const u32 word = word_of(packed, step * 2 + (r >> 1));
            const u32 biased = permute_bytes(word, 0x64646464u, r & 1 ? 0x4342 : 0x4140);
            a[r] = Half::sub2(biased, r & 1 ? zero.high : zero.low);
        }
    }
};

template <>
struct Codes<Bfloat16, 8> {
    static constexpr int kUnitK = 32;

    struct Zero {  // 2^23 + z of rows g and g + 8, as floats
        float low, high;
    };

    __device__ __forceinline__ static Zero symmetric() { return {8388736.0f, 8388736.0f}; }

    __device__ __forceinline__ static Zero zero(u32 pair) {
        return {__uint_as_float(0x4b000000u | (pair & 0xffu)), __uint_as_float(0x4b000000u | (pair >> 8))};
    }

    // Eight bits do not fit bfloat16's mantissa: the detour through float32 is exact, and so is rounding q - z to bfloat16.
    __device__ __forceinline__ static void fragment(u32 (&a)[4], const uint4& packed, int step, const Zero& zero) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const u32 word = word_of(packed, step * 2 + (r >> 1));
            const float z = r & 1 ? zero.high : zero.low;
            const float low = __uint_as_float(permute_bytes(word, 0x4b000000u, 0x7440 + 2 * (r & 1))) - z;
            const float high = __uint_as_float(permute_bytes(word, 0x4b000000u, 0x7441 + 2 * (r & 1))) - z;
            a[r] = Bfloat16::pack(low, high);
        }
    }
};
