"""Normalisation over groups of channels and all pixels of an image."""
