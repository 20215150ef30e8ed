"""Data parallelism for all frameworks: collectives on their arrays, gradient reduction, compression, shards of data."""
