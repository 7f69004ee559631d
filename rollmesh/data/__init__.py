"""`rollmesh data`: published datasets become rows of training data, and the data of a run are checked."""
