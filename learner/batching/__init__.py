"""From trajectories to packed micro-batches: planning by token budget, and packing."""
