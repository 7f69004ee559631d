"""What every rank does: its share of a plan, as packed micro-batches."""
