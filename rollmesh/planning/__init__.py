"""`rollmesh plan`: the memory of a run, computed before it starts: formulas, what does not fit, and what would help."""
