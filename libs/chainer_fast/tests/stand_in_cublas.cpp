// cuBLAS for matrices in host memory: as much as chainer_fast calls, computed in double.

enum { SUCCESS, INVALID_VALUE = 7, NOT_SUPPORTED = 15 };

extern "C" {

// What the last calls got, for the tests.
void *stream, *workspace;
long long workspace_bytes, handles, single, batched;
int compute;
int fails;  // set by the tests

int cublasCreate_v2(void** handle) {
    *handle = (void*)++handles;
    return SUCCESS;
}

int cublasSetStream_v2(void*, void* given) {
    stream = given;
    workspace = nullptr;
    return SUCCESS;
}

int cublasSetWorkspace_v2(void*, void* given, unsigned long size) {
    workspace = given;
    workspace_bytes = size;
    return SUCCESS;
}

const char* cublasGetStatusName(int status) {
    return status == INVALID_VALUE ? "CUBLAS_STATUS_INVALID_VALUE" : "another status";
}
}

template <typename T>
static int multiply(int ta, int tb, int m, int n, int k, double one, const T* a, int lda,
                    const T* b, int ldb, double zero, T* c, int ldc) {
    if (lda < (ta ? k : m) || ldb < (tb ? n : k) || ldc < m || m < 1 || n < 1 || k < 1)
        return INVALID_VALUE;
    for (int i = 0; i < m; ++i)
        for (int j = 0; j < n; ++j) {
            double sum = 0;
            for (int l = 0; l < k; ++l)
                sum += (double)a[ta ? l + (long)i * lda : i + (long)l * lda] *
                       (double)b[tb ? j + (long)l * ldb : l + (long)j * ldb];
            c[i + (long)j * ldc] = (T)(one * sum + (zero ? zero * c[i + (long)j * ldc] : 0));
        }
    return SUCCESS;
}

template <typename T, typename Number>
static int multiply_all(int ta, int tb, int m, int n, int k, const void* one, const void* a,
                        int lda, long long step_a, const void* b, int ldb, long long step_b,
                        const void* zero, void* c, int ldc, long long step_c, int count) {
    int status = SUCCESS;
    for (int i = 0; i < count && !status; ++i)
        status = multiply(ta, tb, m, n, k, *(const Number*)one, (const T*)a + i * step_a, lda,
                          (const T*)b + i * step_b, ldb, *(const Number*)zero,
                          (T*)c + i * step_c, ldc);
    return status;
}

extern "C" {

int cublasGemmStridedBatchedEx(void* handle, int ta, int tb, int m, int n, int k, const void* one,
                               const void* a, int kind_a, int lda, long long step_a,
                               const void* b, int kind_b, int ldb, long long step_b,
                               const void* zero, void* c, int kind_c, int ldc, long long step_c,
                               int count, int compute_as, int algorithm) {
    ++batched;
    compute = compute_as;
    if (fails || !handle || !workspace || kind_a != kind_b || kind_b != kind_c || algorithm != -1)
        return INVALID_VALUE;
    bool is_single = compute == 68 || compute == 77;
    auto run = kind_a == 2 && compute == 68 ? multiply_all<_Float16, float>
             : kind_a == 0 && is_single     ? multiply_all<float, float>
             : kind_a == 1 && compute == 70 ? multiply_all<double, double>
                                            : nullptr;
    if (!run) return NOT_SUPPORTED;
    return run(ta, tb, m, n, k, one, a, lda, step_a, b, ldb, step_b, zero, c, ldc, step_c, count);
}

int cublasGemmEx(void* handle, int ta, int tb, int m, int n, int k, const void* one,
                 const void* a, int kind_a, int lda, const void* b, int kind_b, int ldb,
                 const void* zero, void* c, int kind_c, int ldc, int compute_as, int algorithm) {
    ++single;
    --batched;
    return cublasGemmStridedBatchedEx(handle, ta, tb, m, n, k, one, a, kind_a, lda, 0, b, kind_b,
                                      ldb, 0, zero, c, kind_c, ldc, 0, 1, compute_as, algorithm);
}
}
