"""Put the spans of all ranks on one clock, sum them up, and write them for Perfetto."""
