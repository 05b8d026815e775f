"""Quantization by scales and zero points that are found while a network runs."""
