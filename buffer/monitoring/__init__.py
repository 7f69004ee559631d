"""Observations of a table and of Redis by a front: clocks, latencies, generators, outages."""
