"""The fault proxy: forwards calls to a reward server, and spoils some."""
