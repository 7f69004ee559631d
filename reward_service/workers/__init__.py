"""Worker processes, in which reward functions run that may never end.

CPython can end no thread, and one call that holds the interpreter (big powers, a runaway regular expression) holds all
of them. So what a model's text can send astray never runs in a service's own process:

* functions named by path (`file.py:function`), plain or coroutine functions, and built-in scorers that are not linear
  (`scorers.LINEAR` says which are) run in worker processes;
* linear built-in scorers run in a thread of the service: nothing a model writes can hold them up;
* functions given as objects (`rollmesh.train(..., reward_fn=f)`) cannot leave the program that made them, and run in
  its threads.

* `program.py`: the worker; `process.py`: one worker as its owner sees it.
* `messages.py`: the messages between them; `shared_page.py`: the memory that they share.
* `slot.py`: feeds, judges and replaces one worker; `unit_queue.py`: the queue of several; `calls.py`: its units.
* `pool.py`: all workers of a service.
"""
