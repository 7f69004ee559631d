"""Recorded numbers of other projects, and the runner: `python -m tests.golden MANIFEST`."""
