"""Means, sums, products, maxima and minima over axes."""
