// Lets a C++ compiler build batched_copy.cu: blocks and threads run one after another.
#include <cmath>
#include <cstring>
#define __device__
#define __global__
#define HALF_FROM_HOST
static struct { unsigned x; } blockIdx, threadIdx, blockDim = {256};
static float __uint_as_float(unsigned bits) {
    float number;
    std::memcpy(&number, &bits, 4);
    return number;
}
static unsigned __float_as_uint(float number) {
    unsigned bits;
    std::memcpy(&bits, &number, 4);
    return bits;
}
static float from_half(unsigned short bits) {
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    float magnitude = exponent == 31  ? (fraction ? NAN : INFINITY)
                      : exponent == 0 ? std::ldexp((float)fraction, -24)
                                      : std::ldexp((float)(fraction | 1024), exponent - 25);
    return bits & 0x8000 ? -magnitude : magnitude;
}
template <typename T> static unsigned short to_half(T number) {
    unsigned short sign = std::signbit(number) ? 0x8000 : 0;
    T magnitude = std::fabs(number);
    if (std::isnan(number)) return sign | 0x7e00;
    if (magnitude >= 65520) return sign | 0x7c00;
    int exponent = magnitude < (T)6.103515625e-05 ? -14 : std::ilogb(magnitude);
    // nearbyint rounds ties to even.
    int steps = (int)std::nearbyint(std::ldexp(magnitude, 10 - exponent));
    return sign | (steps + (exponent + 14) * 1024);
}
