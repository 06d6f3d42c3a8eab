// Copies many arrays into one buffer and back, with one block of threads per piece of an array.
// Includes no headers, so NVRTC needs no include paths. 16-bit numbers are stored as their bits.

typedef unsigned short half_bits;
typedef unsigned short bfloat16_bits;
typedef unsigned int uint32;

// The values of KINDS in batched_copy.py.
enum Kind { FLOAT16, BFLOAT16, FLOAT32, FLOAT64 };

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

template <int kind> struct Number;
template <> struct Number<FLOAT16> {
    typedef half_bits Stored;
    typedef float Value;
    static __device__ Value load(Stored stored) { return from_half(stored); }
    template <typename T> static __device__ Stored store(T value) { return to_half(value); }
};
template <> struct Number<BFLOAT16> {
    typedef bfloat16_bits Stored;
    typedef float Value;
    static __device__ Value load(Stored stored) { return from_bfloat16(stored); }
    template <typename T> static __device__ Stored store(T value) { return to_bfloat16(value); }
};
template <> struct Number<FLOAT32> {
    typedef float Stored;
    typedef float Value;
    static __device__ Value load(Stored stored) { return stored; }
    template <typename T> static __device__ Stored store(T value) { return value; }
};
template <> struct Number<FLOAT64> {
    typedef double Stored;
    typedef double Value;
    static __device__ Value load(Stored stored) { return stored; }
    template <typename T> static __device__ Stored store(T value) { return value; }
};

// The type that represents numbers of both kinds exactly.
template <int from, int to> struct Wider { typedef float Type; };
template <int from> struct Wider<from, FLOAT64> { typedef double Type; };
template <int to> struct Wider<FLOAT64, to> { typedef double Type; };
template <> struct Wider<FLOAT64, FLOAT64> { typedef double Type; };

// Issuing several loads before the first store keeps the memory busy.
const int UNROLLED = 8;

template <int from, int to>
__device__ void copy(const void* source, void* target, long long n, double divisor) {
    typedef typename Wider<from, to>::Type Value;
    const typename Number<from>::Stored* in = (const typename Number<from>::Stored*)source;
    typename Number<to>::Stored* out = (typename Number<to>::Stored*)target;
    Value divide_by = (Value)divisor;
    for (long long start = threadIdx.x; start < n; start += UNROLLED * blockDim.x) {
        typename Number<from>::Stored stored[UNROLLED];
#pragma unroll
        for (int k = 0; k < UNROLLED; ++k) {
            long long i = start + k * (long long)blockDim.x;
            if (i < n) stored[k] = in[i];
        }
#pragma unroll
        for (int k = 0; k < UNROLLED; ++k) {
            long long i = start + k * (long long)blockDim.x;
            if (i < n) out[i] = Number<to>::store((Value)Number<from>::load(stored[k]) / divide_by);
        }
    }
}

__device__ long long size_of(int kind) { return kind == FLOAT64 ? 8 : kind == FLOAT32 ? 4 : 2; }

// pointers, kinds, sizes, offsets: address, kind, number of elements and position in the buffer of
// each array. block_arrays, block_starts: index of each block's array, and first element there.
#define ARGUMENTS                                                                              \
    const unsigned long long *pointers, const int *kinds, const long long *sizes,              \
        const long long *offsets, const int *block_arrays, const long long *block_starts,      \
        long long block_length, unsigned long long buffer

template <int wire, bool gathers>
__device__ void move(ARGUMENTS, double divisor) {
    int number = block_arrays[blockIdx.x], kind = kinds[number];
    long long start = block_starts[blockIdx.x], n = sizes[number] - start;
    if (n > block_length) n = block_length;
    char* array = (char*)pointers[number] + start * size_of(kind);
    char* part = (char*)buffer + (offsets[number] + start) * size_of(wire);
#define CASE(KIND)                                                      \
    case KIND:                                                          \
        if (gathers) copy<KIND, wire>(array, part, n, divisor);         \
        else copy<wire, KIND>(part, array, n, divisor);                 \
        break;
    switch (kind) {
        CASE(FLOAT16)
        CASE(BFLOAT16)
        CASE(FLOAT32)
        CASE(FLOAT64)
    }
#undef CASE
}

#define KERNELS(NAME, WIRE)                                                                      \
    extern "C" __global__ void gather_##NAME(ARGUMENTS) {                                        \
        move<WIRE, true>(pointers, kinds, sizes, offsets, block_arrays, block_starts,            \
                         block_length, buffer, 1);                                               \
    }                                                                                            \
    extern "C" __global__ void scatter_##NAME(ARGUMENTS, double divisor) {                       \
        move<WIRE, false>(pointers, kinds, sizes, offsets, block_arrays, block_starts,           \
                          block_length, buffer, divisor);                                        \
    }
KERNELS(float16, FLOAT16)
KERNELS(bfloat16, BFLOAT16)
KERNELS(float32, FLOAT32)
KERNELS(float64, FLOAT64)
