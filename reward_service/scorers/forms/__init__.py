"""Scorers of an answer's form: a pattern, a choice among several, JSON under a schema."""
