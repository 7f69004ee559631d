"""The commands of `docs/quickstart.md`, run as they stand."""
