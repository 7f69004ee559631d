"""Recovery: the consumption log, the identity of a run, and repair after Redis has lost state."""
