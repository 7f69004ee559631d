"""`placement: auto`: placements are measured in the running mesh, faster ones are tried, and the best one stays."""
