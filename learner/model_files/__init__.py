"""A model's folder: where it is, and what its files show before anything is loaded."""
