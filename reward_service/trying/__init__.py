"""A reward tried on responses from files: each one's outcome, and what all of them say together."""
