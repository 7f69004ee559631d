"""`rollmesh doctor`: what is wrong before, during and after a run, each finding with its remedy."""
