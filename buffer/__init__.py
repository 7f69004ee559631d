"""The replay buffer: stateless fronts over Redis, and the client of other services."""

# A second copy, imported by its folder's name, would have registries and classes of its own.
if __name__ != "rollmesh.buffer":
    raise ImportError(f"no module named {__name__!r}: import rollmesh.buffer", name=__name__)
