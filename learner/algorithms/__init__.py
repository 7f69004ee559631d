"""Algorithms in pure torch: advantages, losses, corrections, and the classes that compose them."""
