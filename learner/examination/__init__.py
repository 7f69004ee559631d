"""Model folders examined before anything starts: one answer for all commands."""
