"""Quantization of float networks: ranges measured on samples, a rewriting, a report."""
