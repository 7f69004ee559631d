"""The learner service: algorithms, training engines, the run's coordinator, published weights."""

# A second copy, imported by its folder's name, would have registries and classes of its own.
if __name__ != "rollmesh.learner":
    raise ImportError(f"no module named {__name__!r}: import rollmesh.learner", name=__name__)
