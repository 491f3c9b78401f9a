"""The oracle backend: NumPy, slow and obvious."""
