"""What people search for, with the page and the section that helps."""

SEARCHES = {
    "mixed precision": ("guides/mixed_precision", "Mixed precision"),
    "profiling": ("guides/profiling", "Profiling: find out what is slow"),
    "Jupyter": ("notebooks/index", "Course in Jupyter"),
    "AWS": ("clusters", "Clouds"),
    "deadlock": ("guides/debugging", "A hang or a deadlock"),
    "hang": ("guides/debugging", "A hang or a deadlock"),
    "NaN": ("guides/debugging", "The loss is NaN"),
    "make it faster": ("guides/faster", "Make it faster"),
    "gradient accumulation": ("guides/accumulation", "Gradient accumulation"),
    "reproducibility": ("guides/reproducibility", "Reproducibility"),
    "slow network": ("guides/slow_networks", "Slow networks"),
    "speedup": ("guides/profiling", "Is it twice as fast?"),
    "Docker": ("clusters", "Kubernetes"),
    "CUDA_VISIBLE_DEVICES": ("troubleshooting", "cudaErrorInvalidDevice: invalid device ordinal"),
    "resume": ("guides/resume", "Resume and restarts"),
    "fine-tune": ("guides/fine_tuning", "Fine-tuning"),
    "preemption": ("guides/resume", "Resume and restarts"),
}
