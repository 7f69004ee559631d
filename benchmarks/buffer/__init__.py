"""Benchmarks of the replay buffer: rates, latency, memory, growth, and where the time goes."""
