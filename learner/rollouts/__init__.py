"""Leased groups on their way from the buffer to a batch."""
