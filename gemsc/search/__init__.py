"""What `auto` compares, and how stages are chosen and scheduled for one candidate."""
