"""What all ranks did and when: on one clock, summed up, and written for Perfetto."""
