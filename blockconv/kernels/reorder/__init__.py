"""Reorders: from one layout to another."""
