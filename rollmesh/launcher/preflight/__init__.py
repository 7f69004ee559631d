"""What is checked and decided before any service of a run starts."""
