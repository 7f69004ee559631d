"""Odd model folders, and what each command answers."""
