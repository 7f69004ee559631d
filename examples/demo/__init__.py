"""The demonstration: a tiny model, small verifiable problems, and the whole mesh that trains the one on the others."""
