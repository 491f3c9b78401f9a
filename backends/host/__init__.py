"""What every backend's worker uses of host memory: mappings, digests, exchanges, images of weights."""
