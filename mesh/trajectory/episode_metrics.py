"""Names of metrics of an agent's episode that other services read."""

from __future__ import annotations

CALLS_CONSTRAINED = "calls_constrained"
"""Calls whose answers were drawn under a grammar. Their log-probs are of the allowed tokens alone."""
