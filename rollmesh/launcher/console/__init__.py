"""The user's view of a run in progress."""
