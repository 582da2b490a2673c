"""What operations mean: how they are called, and a table with a row for each kind."""
