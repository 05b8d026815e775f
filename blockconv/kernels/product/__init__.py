"""Products of matrices that all flow, and attention."""
