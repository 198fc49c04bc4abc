"""What the Triton kernels of all operators share: ahead-of-time compilation, and the list of what is compiled."""
