"""A tiny model learns to find a number by the answers to its guesses."""
