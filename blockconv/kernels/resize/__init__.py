"""Resampling of H and W."""
