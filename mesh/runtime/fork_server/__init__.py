"""Starts processes by forking a server that has already done their imports.

Invariants:
- a forked process is a child of the process that ordered it, and dies with its main thread. The server's end touches
  none, and a server that is gone or silent means that its client executes commands itself;
- it looks like a freshly executed process: name, arguments, environment, folder, session, signals, limits and files
  come from the request. The generators of `random` and NumPy and the key of `multiprocessing` are its own. Values that
  a library drew when it was imported, and the seed of hashes, are shared by all that one server forks;
- it ends like one: it waits for threads, calls what `atexit` has registered, and flushes files. Only what its modules
  still hold is not destroyed;
- the server has one thread and no device, runs none of its modules' services, and holds no file of its client.

The server forks twice, and its client adopts the grandchild: it is a subreaper during that request, at most half a
minute. Meanwhile it adopts all orphans of its descendants, also a user's, and reaps them when they end. Linux alone has
this.
"""
