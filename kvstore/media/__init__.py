"""What holds the bytes of a tier."""
