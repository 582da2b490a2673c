"""What depends on shapes and numbers only: made where it is used, or not at all."""
