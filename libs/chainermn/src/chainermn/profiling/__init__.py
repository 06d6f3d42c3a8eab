"""Record what trainers, layers and ranks do, and when."""
