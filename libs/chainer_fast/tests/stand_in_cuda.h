// CUDA on a CPU: the threads of a block take turns at __syncthreads.

#include <ucontext.h>

#include <cstdlib>
#include <cstring>
#include <utility>

#define __device__ static
#define __global__
#define __shared__ static

static int max(int x, int y) { return x > y ? x : y; }
static int min(int x, int y) { return x < y ? x : y; }

typedef _Float16 __half;
static __half __float2half(float x) { return x; }
static float __half2float(__half x) { return x; }
static __half __hadd(__half x, __half y) { return x + y; }
static float __int_as_float(int bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

struct Size {
    int x = 1, y = 1;
};
static Size gridDim, blockDim, blockIdx, threadIdx;

const int MOST = 1024, STACK = 1 << 15;
static ucontext_t turns, threads[MOST];
static char stacks[MOST][STACK];
static void (*body)();
static bool is_waiting;

static void __syncthreads() {
    is_waiting = true;
    swapcontext(&threads[threadIdx.y * blockDim.x + threadIdx.x], &turns);
}

static void start_thread(int i) {
    getcontext(&threads[i]);
    threads[i].uc_stack.ss_sp = stacks[i];
    threads[i].uc_stack.ss_size = STACK;
    threads[i].uc_link = &turns;
    makecontext(&threads[i], body, 0);
}

static bool has_ended(int i) {
    threadIdx.x = i % blockDim.x, threadIdx.y = i / blockDim.x;
    is_waiting = false;
    swapcontext(&turns, &threads[i]);
    return !is_waiting;
}

static void run_block() {
    const int n = blockDim.x * blockDim.y;
    start_thread(0);
    if (has_ended(0)) {
        // The others must not wait either.
        for (int i = 1; i < n; ++i) threadIdx.x = i % blockDim.x, threadIdx.y = i / blockDim.x, body();
        return;
    }
    for (int i = 1; i < n; ++i) start_thread(i);
    for (int i = 1; i < n; ++i)
        if (has_ended(i)) abort();
    for (int ended = 0; ended < n;) {
        // All reach the next barrier, or all end.
        ended = 0;
        for (int i = 0; i < n; ++i) ended += has_ended(i);
        if (ended && ended < n) abort();
    }
}

template <typename... T, size_t... I>
void call(void (*kernel)(T...), void** arguments, std::index_sequence<I...>) {
    kernel(*(T*)arguments[I]...);
}

template <typename... T>
void launch(void (*kernel)(T...), Size grid, Size block, void** arguments) {
    gridDim = grid, blockDim = block;
    static void (*launched)(T...);
    static void** given;
    launched = kernel, given = arguments;
    body = [] { call(launched, given, std::index_sequence_for<T...>()); };
    for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y)
        for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) run_block();
}
