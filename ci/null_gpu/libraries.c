// The functions of CUDA's other libraries that do more than nothing; build.py writes the rest.

#include <stddef.h>
#include <string.h>

int null_gpu_launch(const char *name, void *stream);
#define LAUNCH(stream) null_gpu_launch(__func__, stream)

static int set(int *value, int to) {
    *value = to;
    return 0;
}

int cublasGetVersion_v2(void *handle, int *version) { return set(version, 130000); }
int cublasGetPointerMode_v2(void *handle, int *mode) { return set(mode, 0); }
int cublasGetMathMode(void *handle, int *mode) { return set(mode, 0); }

static __thread void *of_cublas;  // the stream, of whatever handle was used last

int cublasSetStream_v2(void *handle, void *stream) {
    of_cublas = stream;
    return 0;
}

int cublasGetStream_v2(void *handle, void **stream) {
    *stream = of_cublas;
    return 0;
}

// CuPy does without it, but not who calls cuBLAS in a capture.
int cublasSetWorkspace_v2(void *handle, void *workspace, size_t size) { return 0; }

static __thread void *of_cudnn;

int cudnnSetStream(void *handle, void *stream) {
    of_cudnn = stream;
    return 0;
}

int cudnnBackendExecute(void *handle, void *plan, void *pack) { return LAUNCH(of_cudnn); }

int curandGetVersion(int *version) { return set(version, 10400); }

int ncclGetVersion(int *version) { return set(version, 23007); }
int ncclCommGetAsyncError(void *comm, int *error) { return set(error, 0); }
const char *ncclGetErrorString(int error) { return "an error of the null GPU"; }

int ncclGetUniqueId(char *identity) {
    memset(identity, 1, 128);
    return 0;
}

#define FIVE const void *from, void *to, size_t size, int type, int other
int ncclAllReduce(FIVE, void *comm, void *stream) { return LAUNCH(stream); }
int ncclReduceScatter(FIVE, void *comm, void *stream) { return LAUNCH(stream); }
int ncclBroadcast(FIVE, void *comm, void *stream) { return LAUNCH(stream); }
int ncclReduce(FIVE, int root, void *comm, void *stream) { return LAUNCH(stream); }

#define FOUR const void *from, void *to, size_t size, int type
int ncclAllGather(FOUR, void *comm, void *stream) { return LAUNCH(stream); }

#define BUFFER void *buffer, size_t size, int type, int other
int ncclBcast(BUFFER, void *comm, void *stream) { return LAUNCH(stream); }
int ncclSend(BUFFER, void *comm, void *stream) { return LAUNCH(stream); }
int ncclRecv(BUFFER, void *comm, void *stream) { return LAUNCH(stream); }
