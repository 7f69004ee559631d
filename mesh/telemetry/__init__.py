"""Traces of trajectories, and the declarations of metrics."""
