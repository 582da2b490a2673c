"""Parallel branches on different ranks: found, assigned, lowered."""
