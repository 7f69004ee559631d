"""Checks before a run starts: each module gathers facts of this machine, and judges them apart from that."""
