"""A model that judges responses, in a process of its own: its owner, its batches, its engines."""
