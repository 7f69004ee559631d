"""What services tell of themselves while they work: traces of trajectories, and the metrics that all services have."""
