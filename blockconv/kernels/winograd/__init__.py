"""Winograd convolution."""
