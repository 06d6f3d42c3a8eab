"""Probes: each module runs in processes of its own, where `probe.ask` calls its ``examine``."""
