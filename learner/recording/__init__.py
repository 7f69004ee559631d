"""Recorded batches: written while a run trains, compared after a replay."""
