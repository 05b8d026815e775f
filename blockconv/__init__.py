"""blockconv."""
