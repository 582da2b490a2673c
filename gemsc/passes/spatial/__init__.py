"""Tiles: what each tile needs, where the cuts are, and how operations are lowered."""
