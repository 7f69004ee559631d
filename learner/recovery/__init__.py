"""What survives a failure: the consumption log, what a run is of, and repair after Redis lost state."""
