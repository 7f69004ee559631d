"""Agent frameworks and the endpoint."""
