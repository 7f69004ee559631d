"""The local launcher: the whole mesh on this machine, each service as its own process."""
