"""Both placements of a run, planned: on devices of their own, and in turns on the same ones."""
