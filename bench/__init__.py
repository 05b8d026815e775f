"""The comparison harness, run from a clone: `python -m bench`."""
