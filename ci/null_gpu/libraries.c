// The functions of CUDA's other libraries that do more than nothing; build.py writes the rest.

#include <string.h>

static int set(int *value, int to) {
    *value = to;
    return 0;
}

int cublasGetVersion_v2(void *handle, int *version) { return set(version, 130000); }
int cublasGetPointerMode_v2(void *handle, int *mode) { return set(mode, 0); }
int cublasGetMathMode(void *handle, int *mode) { return set(mode, 0); }

int cublasGetStream_v2(void *handle, void **stream) {
    *stream = 0;
    return 0;
}

int curandGetVersion(int *version) { return set(version, 10400); }

int ncclGetVersion(int *version) { return set(version, 23007); }
int ncclCommGetAsyncError(void *comm, int *error) { return set(error, 0); }
const char *ncclGetErrorString(int error) { return "an error of the null GPU"; }

int ncclGetUniqueId(char *identity) {
    memset(identity, 1, 128);
    return 0;
}
