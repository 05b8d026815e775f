"""Convolution from any native layout to any other, as tiles of an outer-product microkernel."""
