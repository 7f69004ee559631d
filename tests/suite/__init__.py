"""The way in which the suite runs: its tiers, its CPU budget, its progress and its summary."""
