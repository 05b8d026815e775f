"""What changes a network before it is planned."""
