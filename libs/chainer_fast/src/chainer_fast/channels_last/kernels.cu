// Kernels for float16 images that lie channels last. kernels.py launches them.
//
// LANES channels that lie side by side are a pack, which a thread moves at once. The number of
// channels is a multiple of LANES. Sums are of float32. THREADS is the size of most blocks.

#include <cuda_fp16.h>

template <typename T>
struct alignas(LANES * sizeof(T)) Pack {
    T lanes[LANES];
};
typedef Pack<__half> Halves;
typedef Pack<unsigned char> Places;

// How windows of height * width pixels lie on images of rows * columns * packs.
struct Windows {
    int images, packs, rows, columns, out_rows, out_columns;
    int height, width, stride_y, stride_x, pad_y, pad_x;
};

// Place of the maximum if no number is greater than -inf.
const unsigned char NOWHERE = 255;

extern "C" __global__ void add_bias(Halves* y, const Halves* bias, int n, int packs) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    Halves v = y[i];
    const Halves b = bias[i % packs];
    #pragma unroll
    for (int k = 0; k < LANES; ++k) v.lanes[k] = __hadd(v.lanes[k], b.lanes[k]);
    y[i] = v;
}

// Images with fewer channels, whatever their order, become images with zeros in the new channels.
extern "C" __global__ void pad(const __half* x, Halves* y, int images, int channels, int pixels,
                               int packs, int channel_step, int pixel_step) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= pixels * packs) return;
    const int pixel = i / packs, first = i % packs * LANES;
    for (long long image = blockIdx.y; image < images; image += gridDim.y) {
        const __half* from = x + image * channels * pixels + pixel * pixel_step;
        Halves v;
        #pragma unroll
        for (int k = 0; k < LANES; ++k) {
            const int channel = first + k;
            v.lanes[k] = channel < channels ? from[channel * channel_step] : __float2half(0);
        }
        y[image * pixels * packs + i] = v;
    }
}

// Sums of some rows of a matrix for each block in x. Blocks in y share the columns.
extern "C" __global__ void sum_rows(const Halves* x, float* sums, int rows, int packs) {
    __shared__ float shared[THREADS * LANES];
    const int first = blockIdx.y * THREADS, width = min(THREADS, packs - first);
    const int n = THREADS / width, row = threadIdx.x / width, pack = threadIdx.x % width;
    float sum[LANES] = {};
    if (row < n) {
        #pragma unroll 4
        for (int i = blockIdx.x * n + row; i < rows; i += gridDim.x * n) {
            const Halves v = x[(long long)i * packs + first + pack];
            #pragma unroll
            for (int k = 0; k < LANES; ++k) sum[k] += __half2float(v.lanes[k]);
        }
        #pragma unroll
        for (int k = 0; k < LANES; ++k) shared[threadIdx.x * LANES + k] = sum[k];
    }
    __syncthreads();
    sums += ((long long)blockIdx.x * packs + first) * LANES;
    for (int column = threadIdx.x; column < width * LANES; column += THREADS) {
        float total = 0;
        for (int j = 0; j < n; ++j) total += shared[j * width * LANES + column];
        sums[column] = total;
    }
}

// Sums of the rows that sum_rows leaves, by blocks of 32 * 32.
extern "C" __global__ void sum_sums(const float* sums, __half* y, int rows, int columns) {
    __shared__ float shared[32][33];
    const int column = blockIdx.x * 32 + threadIdx.x;
    float total = 0;
    if (column < columns)
        for (int i = threadIdx.y; i < rows; i += 32) total += sums[(long long)i * columns + column];
    shared[threadIdx.y][threadIdx.x] = total;
    __syncthreads();
    if (threadIdx.y == 0 && column < columns) {
        for (int j = 1; j < 32; ++j) total += shared[j][threadIdx.x];
        y[column] = __float2half(total);
    }
}

// In the following, a thread has a pack of an image in x; blocks in y share the images. Most windows
// are small: unrolled loops would only take registers, and so threads.

extern "C" __global__ void max_pool(const Halves* x, Halves* y, Places* places, Windows w) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= w.out_rows * w.out_columns * w.packs) return;
    const int pack = i % w.packs, pixel = i / w.packs;
    const int top = pixel / w.out_columns * w.stride_y - w.pad_y;
    const int left = pixel % w.out_columns * w.stride_x - w.pad_x;
    const int bottom = min(w.rows, top + w.height), right = min(w.columns, left + w.width);
    // Chainer's kernel begins with the first pixel of the image, even if it is in no window.
    const bool has_first = top <= 0 && left <= 0 && bottom > 0 && right > 0;
    const unsigned char first = has_first ? -top * w.width - left : NOWHERE;
    for (long long image = blockIdx.y; image < w.images; image += gridDim.y) {
        const Halves* from = x + image * w.rows * w.columns * w.packs + pack;
        float best[LANES];
        Places place;
        #pragma unroll
        for (int k = 0; k < LANES; ++k) best[k] = __int_as_float(0xff800000), place.lanes[k] = first;
        for (int row = max(0, top); row < bottom; ++row) {
            #pragma unroll 1
            for (int column = max(0, left); column < right; ++column) {
                const Halves v = from[(row * w.columns + column) * w.packs];
                const unsigned char here = (row - top) * w.width + column - left;
                #pragma unroll
                for (int k = 0; k < LANES; ++k) {
                    const float value = __half2float(v.lanes[k]);
                    if (best[k] < value) best[k] = value, place.lanes[k] = here;
                }
            }
        }
        Halves v;
        #pragma unroll
        for (int k = 0; k < LANES; ++k) v.lanes[k] = __float2half(best[k]);
        const long long out = image * w.out_rows * w.out_columns * w.packs + i;
        y[out] = v;
        places[out] = place;
    }
}

extern "C" __global__ void average_pool(const Halves* x, Halves* y, Windows w) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= w.out_rows * w.out_columns * w.packs) return;
    const int pack = i % w.packs, pixel = i / w.packs;
    const int top = pixel / w.out_columns * w.stride_y - w.pad_y;
    const int left = pixel % w.out_columns * w.stride_x - w.pad_x;
    const int bottom = min(w.rows, top + w.height), right = min(w.columns, left + w.width);
    for (long long image = blockIdx.y; image < w.images; image += gridDim.y) {
        const Halves* from = x + image * w.rows * w.columns * w.packs + pack;
        float sum[LANES] = {};
        for (int row = max(0, top); row < bottom; ++row) {
            // Several reads at a time, for windows as large as an image.
            #pragma unroll 8
            for (int column = max(0, left); column < right; ++column) {
                const Halves v = from[(row * w.columns + column) * w.packs];
                #pragma unroll
                for (int k = 0; k < LANES; ++k) sum[k] += __half2float(v.lanes[k]);
            }
        }
        Halves v;
        #pragma unroll
        for (int k = 0; k < LANES; ++k) v.lanes[k] = __float2half(sum[k] / (w.height * w.width));
        y[image * w.out_rows * w.out_columns * w.packs + i] = v;
    }
}

// Gradients of pooling: what pool(at, place) gives for all windows that a pixel is in.
template <typename Pool>
__device__ void add_windows(Halves* gx, Windows w, float divisor, Pool pool) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= w.rows * w.columns * w.packs) return;
    const int pack = i % w.packs, pixel = i / w.packs;
    const int y = pixel / w.columns + w.pad_y, x = pixel % w.columns + w.pad_x;
    const int top = max(0, (y - w.height + w.stride_y) / w.stride_y);
    const int left = max(0, (x - w.width + w.stride_x) / w.stride_x);
    // With negative padding, y and x may be negative, and division rounds towards zero.
    const int bottom = min(w.out_rows, (y + w.stride_y) / w.stride_y);
    const int right = min(w.out_columns, (x + w.stride_x) / w.stride_x);
    for (long long image = blockIdx.y; image < w.images; image += gridDim.y) {
        const long long start = image * w.out_rows * w.out_columns * w.packs + pack;
        float sum[LANES] = {};
        for (int row = top; row < bottom; ++row) {
            #pragma unroll 1
            for (int column = left; column < right; ++column) {
                const int place = (y - row * w.stride_y) * w.width + x - column * w.stride_x;
                pool(start + (row * w.out_columns + column) * w.packs, place, sum);
            }
        }
        Halves v;
        #pragma unroll
        for (int k = 0; k < LANES; ++k) v.lanes[k] = __float2half(sum[k] / divisor);
        gx[image * w.rows * w.columns * w.packs + i] = v;
    }
}

extern "C" __global__ void max_pool_gradient(const Halves* gy, const Places* places, Halves* gx,
                                             Windows w) {
    add_windows(gx, w, 1, [=](long long at, int place, float* sum) {
        const Halves v = gy[at];
        const Places p = places[at];
        #pragma unroll
        for (int k = 0; k < LANES; ++k)
            if (p.lanes[k] == place) sum[k] += __half2float(v.lanes[k]);
    });
}

extern "C" __global__ void average_pool_gradient(const Halves* gy, Halves* gx, Windows w) {
    add_windows(gx, w, w.height * w.width, [=](long long at, int, float* sum) {
        const Halves v = gy[at];
        #pragma unroll
        for (int k = 0; k < LANES; ++k) sum[k] += __half2float(v.lanes[k]);
    });
}
