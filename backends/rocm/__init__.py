"""What only AMD's cards have: names of HIP's functions, and the calls that CUDA has in another form."""
