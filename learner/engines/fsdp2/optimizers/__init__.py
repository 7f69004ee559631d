"""Optimizers by name, the groups of parameters that they treat alike, and the schedule of the learning rate."""
