"""Cost models and exact algorithms that decide where a model is cut."""
