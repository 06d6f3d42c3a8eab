"""Settings of a rank's own process: its share of the cores, and how it keeps freed memory."""
