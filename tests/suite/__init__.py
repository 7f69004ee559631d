"""Machinery of the suite: its tiers, its CPU budget, its progress and its summary."""
