"""A tiny model learns to use a calculator for sums that it cannot do in its head."""
