"""Checks of a mesh in progress: what its members report, their clocks, and who reaches whom."""
