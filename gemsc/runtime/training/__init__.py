"""Steps, evaluation, checkpoints: the main program of a rank."""
