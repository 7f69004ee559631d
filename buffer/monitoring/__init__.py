"""What a front observes of a table and of Redis: clocks, latencies, failed groups, outages."""
