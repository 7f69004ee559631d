"""`rollmesh init`: a commented configuration for a model, data and this machine, or out of one of verl or TRL."""
