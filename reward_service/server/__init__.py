"""The reward server: its process, its gRPC handlers, its metrics."""
