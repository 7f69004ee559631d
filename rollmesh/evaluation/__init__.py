"""`rollmesh eval`, `generate` and `compare`: stored models and runs, measured on the same prompts."""
