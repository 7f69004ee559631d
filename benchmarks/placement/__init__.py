"""One mesh in several placements: wall time, memory, swaps."""
