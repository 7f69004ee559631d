"""Gradients, the optimizer, and its steps."""
