"""Passes that change a network before it is planned."""
