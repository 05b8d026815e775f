"""Concatenation, slices, padding: strided copies."""
