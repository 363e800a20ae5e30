"""Data parallelism, by hand and with torch's DistributedDataParallel."""
