"""Studies of learning, its success and its speed: many runs of the real mesh."""
