"""Written once for all frameworks: collectives on their arrays, gradients, compression, shards."""
