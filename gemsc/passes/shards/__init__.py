"""Shards: which dimensions are the same, and what of them a rank can have."""
