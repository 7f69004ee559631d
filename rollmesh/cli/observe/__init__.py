"""The commands that look at a mesh or at the folder of a run."""
