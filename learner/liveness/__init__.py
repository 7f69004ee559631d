"""Liveness: detection and reports of stalled runs, and the end of a learner that hangs."""
