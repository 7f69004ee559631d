"""A sequence classifier as a reward."""
