// What the null GPU's files share.

#pragma once
#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>

// Errors; the text is what CUDA's own messages leave out.
cudaError_t fail(cudaError_t error);
cudaError_t fail_because(cudaError_t error, const char *why);

// Tell the listener of a call in which the host waits.
cudaError_t wait_in(const char *call, size_t bytes);

typedef struct Allocation {
    struct Allocation *next;
    char *start;
    size_t size;
    enum cudaMemoryType type;
    int device;
    bool is_own;
    unsigned long id;  // never used again, unlike the address; 0 for pageable memory
} Allocation;

Allocation find(const void *pointer);

// Stays when it is unloaded: a graph may still want to launch its kernels.
typedef struct { char *image; size_t size; bool is_loaded; } Module;

// What a stream does.
typedef struct {
    enum { KERNEL, COPY, FILL, CALL } kind;
    const char *name;
    const Module *module;
    char *to;
    const char *from;
    size_t width, height, to_pitch, from_pitch;
    int value;
    cudaHostFn_t call;
    void *data;
    // Of a node in a graph
    int stream;
    unsigned long to_id, from_id;
} Work;

// Do the work, or record it if the stream is capturing.
cudaError_t submit(cudaStream_t stream, Work work);

// Fail, and invalidate this thread's captures, if there are any.
cudaError_t refuse_in_capture(const char *why);

// Fail if the stream is capturing, and invalidate the capture.
cudaError_t refuse_on_capturing(cudaStream_t stream, const char *why);

// The same for any stream.
cudaError_t refuse_while_any_captures(const char *why);
