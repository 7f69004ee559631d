"""Recorded numbers of other projects, and the runner that compares ours with them: `python -m tests.golden MANIFEST`."""
