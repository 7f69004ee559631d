"""Sequence parallelism: processes divide the tokens of a micro-batch, and the heads of its attention."""
