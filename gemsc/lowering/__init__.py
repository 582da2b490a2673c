"""What `gemsc.compiler` does in order: trace, cut into stages, cut evaluation."""
