"""The demonstration: a tiny model, small verifiable problems, and a whole mesh that trains it on them."""
