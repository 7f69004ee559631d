"""Training engines: one interface, chosen by (model type, backend, device)."""
