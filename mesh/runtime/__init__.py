"""Parts of every process of the mesh: event loop, threads, memory, files, logs, child processes."""
