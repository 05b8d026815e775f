"""Gathers and scatters by indices that flow; sums and largest elements along an axis."""
