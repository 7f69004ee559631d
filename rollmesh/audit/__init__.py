"""Rewards looked at: tried on responses of files, and audited in the records of a run."""
