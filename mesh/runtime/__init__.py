"""What every process of the mesh has in common: event loop, threads, memory, files, logs, child processes."""
