"""Python runs this when it starts, because ``ci/null_gpu`` puts this folder on the path."""

import os

if "CHAINERMN_NULL_GPU" in os.environ:
    import null_gpu_at_work  # type: ignore[import-not-found] # beside this

    null_gpu_at_work.install()
