"""Ways of a call to a reward server: one interface, and one module per protocol."""
