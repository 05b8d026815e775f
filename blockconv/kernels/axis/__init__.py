"""Ops whose results need all elements along an axis: bodies of the walk over it."""
