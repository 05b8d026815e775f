"""What a plan says of itself."""
