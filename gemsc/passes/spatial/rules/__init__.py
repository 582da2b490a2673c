"""Rules: how one kind of call is computed on a tile."""
