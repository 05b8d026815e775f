"""Readers of other libraries' models."""
