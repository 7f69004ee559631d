"""The generator service: inference engines, groups in progress, agents, received weights."""

# A second copy, imported by its folder's name, would have registries and classes of its own.
if __name__ != "rollmesh.generators":
    raise ImportError(f"no module named {__name__!r}: import rollmesh.generators", name=__name__)
