"""The deadlines of checkpoints, for the learner and for those that wait for its end. Nothing heavy is imported here."""

from __future__ import annotations

WRITE_S = 1800.0
"""Longest write of a checkpoint, in seconds.

Ranks wait for one another as in any exchange: `learner.distributed.timeout_s`.
"""
COMMIT_S = 180.0
"""Longest commit, once the version is in force; its client repeats the call for less than this."""
WAIT_S = 2 * WRITE_S + COMMIT_S
"""Longest wait of the training for a checkpoint: for a writer that has given up its own.

No publication counts here: training has waited for the version's own before it waits for its checkpoint.
"""
LAST_S = 2 * WAIT_S + WRITE_S
"""Longest time in which a learner that ends writes: the checkpoint before, the last one, and its copies elsewhere."""
