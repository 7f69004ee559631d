"""Evaluation on held-out prompts: rounds, metrics, result files."""
