"""Frozen processes: reading their state, judging it, watching them until they freeze."""
