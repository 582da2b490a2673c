"""What Keras' compile() was given, as PyTorch: loss, optimizer, schedule, metrics."""
