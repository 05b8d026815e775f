"""Filters of images: windows over NumPy arrays of any number of dimensions, as `scipy.ndimage` defines them."""
