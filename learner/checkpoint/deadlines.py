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
EXPORT_S = 2 * WRITE_S
"""Longest write of a run's Hugging Face folders: of the last checkpoint, and of the best one."""
LAST_S = 2 * WAIT_S + WRITE_S + EXPORT_S
"""Longest time in which a learner that ends writes.

First the checkpoint before and the last one, then its copies elsewhere, at last the Hugging Face folders.
"""
