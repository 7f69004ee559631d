"""The configuration of single scorers: one section each."""
