"""Trajectories become packed micro-batches: planning by token budget, and packing."""
