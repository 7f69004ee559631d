"""The page of runs, fed by their meshes; and the page that a run in progress serves."""
