"""Processes that begin with their imports done: forked from a server that has loaded them, not executed.

Invariants:
- a forked process is a child of the process that ordered it, and dies with its main thread. The server's end touches
  none, and a server that is gone or silent means that its client executes commands itself;
- it is as one that was executed: name, arguments, environment, folder, session, signals, limits and files are those of
  the order. Nothing random is another's, except the seed of hashes;
- the server has one thread and no device, runs none of its modules' services, and holds no file of its client.

The server forks twice, and its client adopts the grandchild: it is a subreaper for that moment. So a process that must
not adopt orphans, as a user's own, adopts none. Linux alone has this.
"""
