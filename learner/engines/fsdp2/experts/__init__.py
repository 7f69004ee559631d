"""Mixtures of experts: their division over ranks, and what their routers choose."""
