"""The reward service: scorers, the gRPC server around them, and the client that generators use.

Invariant: an item ends as scored, unscorable or in error; a failure is never a score of zero.
"""

# A second copy, imported by its folder's name, would have registries and classes of its own.
if __name__ != "rollmesh.reward_service":
    raise ImportError(f"no module named {__name__!r}: import rollmesh.reward_service", name=__name__)
