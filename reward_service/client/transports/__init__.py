"""How a call reaches a reward server: one interface, and one module per protocol."""
