"""What operators and messages take on a machine: seconds and bytes."""
