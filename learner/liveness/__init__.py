"""Liveness: stalled runs, learners that hang and ranks that are lost are found, named and ended."""
