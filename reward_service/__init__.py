"""The reward service: scorers, the gRPC server around them, and the client that generators use.

Invariant: an item ends as scored, unscorable or in error; a failure is never a score of zero.
"""
