"""Checks and decisions before any service of a run starts."""
