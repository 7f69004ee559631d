"""The work of every rank: its share of a plan, as packed micro-batches."""
