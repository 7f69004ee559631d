"""Redis without reinforcement learning: connections, cluster, scripts, the embedded server."""
