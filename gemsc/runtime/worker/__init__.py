"""What a generated rank file calls."""
