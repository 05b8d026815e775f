"""PyTorch's functions and modules on blockconv's kernels, with gradients. `blockconv.torch` is the way in."""
