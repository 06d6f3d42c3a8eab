// Streams, events and graphs of the null GPU.
//
// Work is done before a call returns, unless its stream is capturing: then a graph records it.
// Each launch of the graph copies what is in the memory at that time. Captures are relaxed, as
// CuPy's are by default.

#define _GNU_SOURCE
#include "null_gpu.h"

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_STREAMS = 32 };  // in one capture

// For each stream of a capture, how much of its work has come before.
typedef struct { unsigned of[MOST_STREAMS]; } Clock;

typedef struct Graph {
    Work *nodes;
    size_t n_nodes;
} Graph;

typedef struct Capture Capture;

typedef struct {
    bool is_blocking;  // waits for the default stream, and the default stream for it
    Capture *capture;
    int index;
    Clock clock;
} Stream;

struct Capture {
    Capture *next;
    unsigned long id;
    pthread_t thread;
    bool is_invalid;
    Stream *streams[MOST_STREAMS];
    int n_streams;
    Graph graph;
};

typedef struct {
    bool is_recorded;
    unsigned long capture;  // its id, 0 for none
    Clock clock;
} Event;

static Capture *captures;  // under way
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Stream legacy;
static __thread Stream per_thread = {.is_blocking = true};

static unsigned long launches, finished, replays, replayed;

unsigned long null_gpu_launches(void) { return launches; }
unsigned long null_gpu_captures(void) { return finished; }
unsigned long null_gpu_replays(void) { return replays; }
unsigned long null_gpu_replayed(void) { return replayed; }

// The calling function holds the lock until it returns. It must not tell the listener of anything,
// which may wait for a thread that waits for the lock.
static void unlock(pthread_mutex_t **held) { pthread_mutex_unlock(*held); }
#define LOCKED __attribute__((cleanup(unlock))) pthread_mutex_t *held = &lock; \
    pthread_mutex_lock(held)

static Stream *find_stream(cudaStream_t stream) {
    if (!stream || stream == cudaStreamLegacy) return &legacy;
    return stream == cudaStreamPerThread ? &per_thread : (Stream *)stream;
}

static cudaError_t invalidate(Capture *capture, cudaError_t error, const char *why) {
    capture->is_invalid = true;
    return fail_because(error, why);
}

// Capturing

static Capture *capture_that_blocks_legacy(void) {
    for (Capture *each = captures; each; each = each->next)
        for (int i = 0; i < each->n_streams; ++i)
            if (each->streams[i]->is_blocking) return each;
    return NULL;
}

static cudaError_t check_use(Stream *stream) {
    Capture *blocks = stream == &legacy ? capture_that_blocks_legacy() : NULL;
    if (blocks)
        return invalidate(blocks, cudaErrorStreamCaptureImplicit,
                          "the default stream waits for a stream that is capturing");
    if (stream->capture && stream->capture->is_invalid)
        return fail_because(cudaErrorStreamCaptureInvalidated, "the capture had an error before");
    return cudaSuccess;
}

bool null_gpu_is_capturing(void) {
    LOCKED;
    for (Capture *each = captures; each; each = each->next)
        if (pthread_equal(each->thread, pthread_self())) return true;
    return false;
}

cudaError_t refuse_in_capture(const char *why) {
    LOCKED;
    cudaError_t error = cudaSuccess;
    for (Capture *each = captures; each; each = each->next)
        if (pthread_equal(each->thread, pthread_self()))
            error = invalidate(each, cudaErrorStreamCaptureUnsupported, why);
    return error;
}

cudaError_t refuse_on_capturing(cudaStream_t handle, const char *why) {
    LOCKED;
    Stream *stream = find_stream(handle);
    if (check_use(stream)) return cudaPeekAtLastError();
    if (!stream->capture) return cudaSuccess;
    return invalidate(stream->capture, cudaErrorStreamCaptureUnsupported, why);
}

cudaError_t refuse_while_any_captures(const char *why) {
    LOCKED;
    cudaError_t error = cudaSuccess;
    for (Capture *each = captures; each; each = each->next)
        error = invalidate(each, cudaErrorStreamCaptureUnsupported, why);
    return error;
}

static cudaError_t join(Capture *capture, Stream *stream) {
    if (capture->n_streams == MOST_STREAMS)
        return invalidate(capture, cudaErrorNotSupported, "too many streams for the null GPU");
    stream->capture = capture;
    stream->index = capture->n_streams;
    stream->clock = (Clock){0};
    stream->clock.of[stream->index] = 1;
    capture->streams[capture->n_streams++] = stream;
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, enum cudaStreamCaptureMode mode) {
    static unsigned long n_begun;
    LOCKED;
    Stream *stream = find_stream(handle);
    if (stream == &legacy)
        return fail_because(cudaErrorStreamCaptureUnsupported,
                            "the default stream cannot be captured");
    if (stream->capture) return fail(cudaErrorIllegalState);
    if (mode != cudaStreamCaptureModeRelaxed)
        return fail_because(cudaErrorNotSupported, "captures of the null GPU are relaxed");
    Capture *new = malloc(sizeof *new);
    *new = (Capture){.next = captures, .id = ++n_begun, .thread = pthread_self()};
    captures = new;
    return join(new, stream);
}

static bool is_joined(const Capture *capture) {
    const Clock *end = &capture->streams[0]->clock;
    for (int i = 0; i < capture->n_streams; ++i)
        if (end->of[i] < capture->streams[i]->clock.of[i]) return false;
    return true;
}

static cudaGraph_t copy(const Graph *graph) {
    Graph *new = malloc(sizeof *new);
    size_t size = graph->n_nodes * sizeof *graph->nodes;
    *new = (Graph){malloc(size), graph->n_nodes};
    memcpy(new->nodes, graph->nodes, size);
    return (cudaGraph_t)new;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph) {
    LOCKED;
    *graph = NULL;
    Capture *capture = find_stream(handle)->capture;
    if (!capture) return fail_because(cudaErrorIllegalState, "the stream is not capturing");
    if (capture->streams[0] != find_stream(handle))
        return invalidate(capture, cudaErrorStreamCaptureUnmatched,
                          "the capture began in another stream");
    cudaError_t error = cudaSuccess;
    if (capture->is_invalid)
        error = fail_because(cudaErrorStreamCaptureInvalidated, "the capture had an error before");
    else if (!is_joined(capture))
        error = fail_because(cudaErrorStreamCaptureUnjoined,
                             "the stream has not waited for another that joined the capture");
    for (int i = 0; i < capture->n_streams; ++i) capture->streams[i]->capture = NULL;
    Capture **link = &captures;
    while (*link != capture) link = &(*link)->next;
    *link = capture->next;
    if (!error) {
        *graph = copy(&capture->graph);
        ++finished;
    }
    free(capture->graph.nodes);
    free(capture);
    return error;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, enum cudaStreamCaptureStatus *status) {
    LOCKED;
    Stream *stream = find_stream(handle);
    if (stream == &legacy && capture_that_blocks_legacy())
        return fail(cudaErrorStreamCaptureImplicit);  // the only use that does no harm
    *status = !stream->capture               ? cudaStreamCaptureStatusNone
              : stream->capture->is_invalid ? cudaStreamCaptureStatusInvalidated
                                            : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}

static cudaError_t record(Stream *stream, Work work) {
    Capture *capture = stream->capture;
    work.stream = stream->index;
    work.to_id = find(work.to).id;
    work.from_id = find(work.from).id;
    bool is_pageable = (work.kind == COPY && !work.from_id) ||
                       ((work.kind == COPY || work.kind == FILL) && !work.to_id);
    if (is_pageable)
        return invalidate(capture, cudaErrorStreamCaptureUnsupported,
                          "a copy from or to memory that a replay cannot rely on");
    Graph *graph = &capture->graph;
    graph->nodes = realloc(graph->nodes, (graph->n_nodes + 1) * sizeof work);
    graph->nodes[graph->n_nodes++] = work;
    ++stream->clock.of[stream->index];
    return cudaSuccess;
}

static void perform(const Work *work) {
    switch (work->kind) {
        case KERNEL: __atomic_add_fetch(&launches, 1, __ATOMIC_RELAXED); break;
        case COPY:
            for (size_t row = 0; row < work->height; ++row)
                memmove(work->to + row * work->to_pitch, work->from + row * work->from_pitch,
                        work->width);
            break;
        case FILL: memset(work->to, work->value, work->width); break;
        case CALL: work->call(work->data);
    }
}

static cudaError_t record_if_capturing(Stream *stream, Work work, bool *is_recorded) {
    LOCKED;
    if (check_use(stream)) return cudaPeekAtLastError();
    *is_recorded = stream->capture;
    return *is_recorded ? record(stream, work) : cudaSuccess;
}

cudaError_t submit(cudaStream_t stream, Work work) {
    bool is_recorded = false;
    cudaError_t error = record_if_capturing(find_stream(stream), work, &is_recorded);
    if (!error && !is_recorded) perform(&work);
    return error;
}

// Stand-ins of other libraries launch their kernels so.
int null_gpu_launch(const char *name, void *stream) {
    return submit(stream, (Work){.kind = KERNEL, .name = name});
}

// Graphs

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph,
                                 unsigned long long flags) {
    *executable = (cudaGraphExec_t)copy((Graph *)graph);
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    free(((Graph *)graph)->nodes);
    free(graph);
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
    return cudaGraphDestroy((cudaGraph_t)executable);
}

cudaError_t cudaGraphUpload(cudaGraphExec_t executable, cudaStream_t stream) {
    return refuse_on_capturing(stream, "the null GPU has no graphs in graphs");
}

static bool is_gone(const Work *work) {
    return (work->to_id && find(work->to).id != work->to_id) ||
           (work->from_id && find(work->from).id != work->from_id) ||
           (work->module && !work->module->is_loaded);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    if (refuse_on_capturing(stream, "the null GPU has no graphs in graphs"))
        return cudaPeekAtLastError();
    const Graph *graph = (Graph *)executable;
    for (const Work *node = graph->nodes; node < graph->nodes + graph->n_nodes; ++node)
        if (is_gone(node))
            return fail_because(cudaErrorIllegalAddress, node->kind == KERNEL
                                    ? "a kernel of the graph has been unloaded"
                                    : "memory that the graph copies has been freed");
    for (const Work *node = graph->nodes; node < graph->nodes + graph->n_nodes; ++node) {
        perform(node);
        if (node->kind == KERNEL) __atomic_add_fetch(&replayed, 1, __ATOMIC_RELAXED);
    }
    __atomic_add_fetch(&replays, 1, __ATOMIC_RELAXED);
    return cudaSuccess;
}

// One line for each node, in the order of the capture, with the number of its stream.
cudaError_t cudaGraphDebugDotPrint(cudaGraph_t graph, const char *path, unsigned flags) {
    FILE *file = fopen(path, "w");
    if (!file) return fail(cudaErrorOperatingSystem);
    fprintf(file, "digraph {\n");
    for (size_t i = 0; i < ((Graph *)graph)->n_nodes; ++i) {
        const Work *node = &((Graph *)graph)->nodes[i];
        fprintf(file, "%zu [label=\"stream %d: ", i, node->stream);
        switch (node->kind) {
            case KERNEL: fprintf(file, "kernel %s", node->name); break;
            case COPY: fprintf(file, "copy %zu", node->width * node->height); break;
            case FILL: fprintf(file, "fill %zu", node->width); break;
            case CALL: fprintf(file, "call");
        }
        fprintf(file, "\"]\n");
    }
    fprintf(file, "}\n");
    fclose(file);
    return cudaSuccess;
}

// Streams

static cudaError_t make_stream(cudaStream_t *handle, bool is_blocking) {
    Stream *new = calloc(1, sizeof *new);
    new->is_blocking = is_blocking;
    *handle = (cudaStream_t)new;
    return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) { return make_stream(stream, true); }

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    return make_stream(stream, !(flags & cudaStreamNonBlocking));
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    return cudaStreamCreateWithFlags(stream, flags);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    if (refuse_on_capturing(stream, "the stream is capturing")) return cudaPeekAtLastError();
    free(stream);
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    wait_in("cudaStreamSynchronize", 0);
    return refuse_on_capturing(stream, "the stream is capturing: nothing runs");
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    return refuse_on_capturing(stream, "the stream is capturing: nothing runs");
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void *data,
                                  unsigned flags) {
    if (refuse_on_capturing(stream, "graphs have no callbacks of this kind"))
        return cudaPeekAtLastError();
    call(stream, cudaSuccess, data);
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void *data) {
    return submit(stream, (Work){.kind = CALL, .call = call, .data = data});
}

// Events

static Capture *find_capture(unsigned long id) {
    Capture *found = captures;
    while (found && found->id != id) found = found->next;
    return found;
}

static cudaError_t check_not_captured(cudaEvent_t handle) {
    LOCKED;
    const Event *event = (Event *)handle;
    if (!event->capture) return cudaSuccess;
    Capture *capture = find_capture(event->capture);
    if (capture) capture->is_invalid = true;
    return fail_because(cudaErrorCapturedEvent, "the event was recorded in a capture");
}

cudaError_t cudaEventCreate(cudaEvent_t *event) {
    *event = calloc(1, sizeof(Event));
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    return cudaEventCreate(event);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    free(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t on) {
    LOCKED;
    Stream *stream = find_stream(on);
    if (!handle) return fail(cudaErrorInvalidResourceHandle);
    if (check_use(stream)) return cudaPeekAtLastError();
    *(Event *)handle = (Event){true, stream->capture ? stream->capture->id : 0, stream->clock};
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) { return check_not_captured(event); }

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    wait_in("cudaEventSynchronize", 0);
    return check_not_captured(event);
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    if (check_not_captured(start) || check_not_captured(end)) return cudaPeekAtLastError();
    if (!((Event *)start)->is_recorded || !((Event *)end)->is_recorded)
        return fail(cudaErrorInvalidResourceHandle);
    *milliseconds = 1;
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t awaited, unsigned flags) {
    LOCKED;
    Stream *stream = find_stream(handle);
    const Event *event = (Event *)awaited;
    if (!event) return fail(cudaErrorInvalidResourceHandle);
    if (check_use(stream)) return cudaPeekAtLastError();
    Capture *from = find_capture(event->capture), *to = stream->capture;
    if (to && !from && event->is_recorded)
        return invalidate(to, cudaErrorStreamCaptureIsolation,
                          "the event was recorded outside the capture");
    if (to && from && to != from) {
        from->is_invalid = true;
        return invalidate(to, cudaErrorStreamCaptureMerge,
                          "the event was recorded in another capture");
    }
    if (!from) return event->capture ? fail(cudaErrorCapturedEvent) : cudaSuccess;
    if (stream == &legacy)
        return invalidate(from, cudaErrorStreamCaptureUnsupported,
                          "the default stream cannot join a capture");
    if (!to && join(from, stream)) return cudaPeekAtLastError();
    for (int i = 0; i < MOST_STREAMS; ++i)
        if (stream->clock.of[i] < event->clock.of[i]) stream->clock.of[i] = event->clock.of[i];
    return cudaSuccess;
}
