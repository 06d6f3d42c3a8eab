"""What all ranks do and when: recorded, put on one clock, summed up, and written for Perfetto."""
