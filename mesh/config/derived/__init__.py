"""Decisions that follow from the whole configuration: pure functions of it."""
