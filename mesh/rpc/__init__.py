"""gRPC as the mesh uses it: channels, servers, retries, errors that keep their type."""
