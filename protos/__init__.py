"""The gRPC contracts between the services, and the modules generated from them."""

# A second copy, imported by its folder's name, would have registries and classes of its own.
if __name__ != "rollmesh.protos":
    raise ImportError(f"no module named {__name__!r}: import rollmesh.protos", name=__name__)
