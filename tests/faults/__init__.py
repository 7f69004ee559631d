"""Faults by seed on the real mesh, and the audit of what the optimizer consumed."""
