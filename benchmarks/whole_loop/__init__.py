"""Samples per second of the whole loop, against a peer and against itself."""
