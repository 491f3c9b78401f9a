"""What the CUDA and the ROCm backend share: device code, its symbols, its compilers."""
