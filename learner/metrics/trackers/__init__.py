"""Trackers: the destinations of a run's records and kept samples, one module each."""
