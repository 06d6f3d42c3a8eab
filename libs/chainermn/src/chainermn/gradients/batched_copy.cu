// Copies many arrays into one buffer and back, with one block of threads per piece of an array.
// Includes no headers, so NVRTC needs no include paths. 16-bit numbers are stored as their bits.
// batched_copy.py appends KERNELS(dtype of the arrays, dtype of the buffer).

typedef unsigned short half_bits;
typedef unsigned short bfloat16_bits;
typedef unsigned int uint32;

#ifndef HALF_FROM_HOST
__device__ float from_half(half_bits bits) {
    float number;
    asm("cvt.f32.f16 %0, %1;" : "=f"(number) : "h"(bits));
    return number;
}
__device__ half_bits to_half(float number) {
    half_bits bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(number));
    return bits;
}
__device__ half_bits to_half(double number) {
    half_bits bits;
    asm("cvt.rn.f16.f64 %0, %1;" : "=h"(bits) : "d"(number));
    return bits;
}
#endif

__device__ float from_bfloat16(bfloat16_bits bits) {
    return __uint_as_float((uint32)bits << 16);
}
__device__ bfloat16_bits to_bfloat16(float number) {
    uint32 bits = __float_as_uint(number);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (bits >> 16) | 0x40u;  // stays NaN
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to nearest, ties to even
}

struct float16 {
    typedef half_bits Stored;
    typedef float Value;
    static __device__ Value load(Stored stored) { return from_half(stored); }
    template <typename T> static __device__ Stored store(T value) { return to_half(value); }
};
struct bfloat16 {
    typedef bfloat16_bits Stored;
    typedef float Value;
    static __device__ Value load(Stored stored) { return from_bfloat16(stored); }
    template <typename T> static __device__ Stored store(T value) { return to_bfloat16(value); }
};
struct float32 {
    typedef float Stored;
    typedef float Value;
    static __device__ Value load(Stored stored) { return stored; }
    template <typename T> static __device__ Stored store(T value) { return value; }
};
struct float64 {
    typedef double Stored;
    typedef double Value;
    static __device__ Value load(Stored stored) { return stored; }
    template <typename T> static __device__ Stored store(T value) { return value; }
};

// As batched_copy.py has it: the array, its first element here, the number of elements, and where
// in the buffer they are.
struct Piece {
    long long array, start, n, position;
};

// What one instruction moves.
template <typename Stored, int width> struct alignas(width * sizeof(Stored)) Pack {
    Stored numbers[width];
};

template <typename T> __device__ bool is_aligned(const void* address) {
    return (unsigned long long)address % sizeof(T) == 0;
}

// Issuing all loads before the first store keeps the memory busy.
const int LOADS_PER_THREAD = 4;

template <typename From, typename To>
__device__ void copy(const typename From::Stored* in, typename To::Stored* out, int n,
                     double divisor) {
    typedef decltype(typename From::Value() + typename To::Value()) Value;
    const int from_size = sizeof(typename From::Stored), to_size = sizeof(typename To::Stored);
    const int width = 16 / (from_size > to_size ? from_size : to_size);
    typedef Pack<typename From::Stored, width> In;
    typedef Pack<typename To::Stored, width> Out;
    Value divide_by = (Value)divisor;
    int n_packed = 0;
    if (is_aligned<In>(in) && is_aligned<Out>(out)) {
        const int most = LOADS_PER_THREAD * blockDim.x;
        int n_packs = n / width < most ? n / width : most;
        In packs[LOADS_PER_THREAD];
#pragma unroll
        for (int k = 0; k < LOADS_PER_THREAD; ++k) {
            int i = threadIdx.x + k * blockDim.x;
            if (i < n_packs) packs[k] = ((const In*)in)[i];
        }
#pragma unroll
        for (int k = 0; k < LOADS_PER_THREAD; ++k) {
            int i = threadIdx.x + k * blockDim.x;
            if (i >= n_packs) break;
            Out converted;
#pragma unroll
            for (int j = 0; j < width; ++j) {
                Value value = From::load(packs[k].numbers[j]);
                converted.numbers[j] = To::store(value / divide_by);
            }
            ((Out*)out)[i] = converted;
        }
        n_packed = n_packs * width;
    }
    for (int i = n_packed + threadIdx.x; i < n; i += blockDim.x) {
        out[i] = To::store((Value)From::load(in[i]) / divide_by);
    }
}

// The buffer is padded with zeros behind each array.
#define KERNELS(ARRAY, WIRE)                                                                     \
    extern "C" __global__ void gather_##ARRAY##_##WIRE(                                          \
        const Piece* pieces, const ARRAY::Stored* const* arrays, WIRE::Stored* buffer) {         \
        const Piece piece = pieces[blockIdx.x];                                                  \
        WIRE::Stored* out = buffer + piece.position;                                             \
        copy<ARRAY, WIRE>(arrays[piece.array] + piece.start, out, piece.n, 1);                   \
        int end = (piece.n + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;                             \
        for (int i = piece.n + threadIdx.x; i < end; i += blockDim.x) out[i] = 0;                \
    }                                                                                            \
    extern "C" __global__ void scatter_##ARRAY##_##WIRE(                                         \
        const Piece* pieces, ARRAY::Stored* const* arrays, const WIRE::Stored* buffer,           \
        double divisor) {                                                                        \
        const Piece piece = pieces[blockIdx.x];                                                  \
        ARRAY::Stored* out = arrays[piece.array] + piece.start;                                  \
        copy<WIRE, ARRAY>(buffer + piece.position, out, piece.n, divisor);                       \
    }
