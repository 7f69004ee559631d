"""Weights on their way: transports, relays."""
