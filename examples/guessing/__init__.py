"""A tiny model learns to find a number by what it is told about its guesses."""
