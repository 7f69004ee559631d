"""Trajectories: their bytes, compression, images, policy versions and their lineage."""
