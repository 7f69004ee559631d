"""Layers that carry state from token to token (linear attention, state spaces, short convolutions) in packed rows."""
