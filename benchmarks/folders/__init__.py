"""Odd model folders, and the answers of each command."""
