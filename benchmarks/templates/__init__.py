"""What chat templates do with conversations."""
