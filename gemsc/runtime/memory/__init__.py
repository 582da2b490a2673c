"""What a rank keeps from forward to backward: recomputed, offloaded, counted."""
