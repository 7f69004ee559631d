"""The model, and micro-batches on their way through it."""
