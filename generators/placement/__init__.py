"""Turns on devices that a learner uses meanwhile: this generator's sleep, and how it wakes."""
