"""What a rank sets for its own process: its share of the cores, its memory."""
