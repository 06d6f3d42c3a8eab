"""What people search for, with the page and the section that helps."""

SEARCHES = {
    "mixed precision": ("tips", "Mixed precision: float16 and bfloat16"),
    "profiling": ("guides/profiling", "Profiling: why is it slow?"),
    "Jupyter": ("notebooks/index", "Course in Jupyter"),
    "AWS": ("clusters", "Clouds"),
    "deadlock": ("guides/debugging", "A hang or a deadlock"),
    "hang": ("guides/debugging", "A hang or a deadlock"),
    "NaN": ("guides/debugging", "The loss is NaN"),
    "speedup": ("guides/profiling", "Is it twice as fast?"),
    "Docker": ("clusters", "Kubernetes"),
    "CUDA_VISIBLE_DEVICES": ("troubleshooting", "cudaErrorInvalidDevice: invalid device ordinal"),
    "resume": ("guides/resume", "Resume and restarts"),
    "fine-tune": ("guides/fine_tuning", "Fine-tuning"),
    "preemption": ("guides/resume", "Resume and restarts"),
}
