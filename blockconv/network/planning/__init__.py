"""Which layout each op works in."""
