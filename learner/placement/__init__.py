"""Turns of the learner on devices that generators use meanwhile: when one begins and ends, and the swaps between."""
