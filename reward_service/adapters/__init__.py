"""Rewards that were written for other projects, as they are: one module per project and form."""
