"""What only NVIDIA's cards have: names of the driver's functions, and the calls that HIP has in another form."""
