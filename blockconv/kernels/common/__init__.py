"""Code that all families of kernels share."""
