"""What all families of kernels share."""
