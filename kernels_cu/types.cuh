// Names for fixed-width types. The kernels include no header of CUDA or C++, so that NVRTC needs none installed.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

// One 16-byte piece, the widest access of a lane.
struct alignas(16) Vec16 {
    u32 w[4];
};

// Through the built-in vector type: an array member by itself may be read in four accesses.
__device__ __forceinline__ Vec16 load_16(const void* pointer) {
    const uint4 v = *static_cast<const uint4*>(pointer);
    return {{v.x, v.y, v.z, v.w}};
}

__device__ __forceinline__ u32 word_of(const uint4& v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// A loop unrolled by the language, whose index is a constant: instructions take it as an immediate offset.
template <int kValue>
struct Index {
    static constexpr int value = kValue;
};

template <int kCount, int kFirst = 0, class Body>
__device__ __forceinline__ void for_each(const Body& body) {
    if constexpr (kFirst < kCount) {
        body(Index<kFirst>());
        for_each<kCount, kFirst + 1>(body);
    }
}

constexpr int kWarpSize = 32;

__device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__device__ constexpr int min_of(int a, int b) { return a < b ? a : b; }
__device__ constexpr int max_of(int a, int b) { return a > b ? a : b; }
