"""Execution of programs that a model has written, confined by the kernel.

A *zygote* is a warm Python process that forks programs. It never sees a job's data, so that no program finds those of
another in its memory. A *keeper* reads jobs, has the zygote fork their programs, and watches them.

* `interface.py`: jobs, their limits, and how they ended; `executor.py`: a pool of zygotes that runs jobs; `ends.py`.
* `configured.py`: the executor that a configuration asks for; `service.py`: one that serves other machines.
* `zygote_process.py`: one zygote as its owner sees it; `messages.py`: the messages between them.
* `zygote.py`: the zygote; `keeper.py`: the keeper, with the folder of `folder.py`.
* `program.py`: the confined process of a run; `python_program.py`: a Python program in it.
* `namespaces.py`, `landlock.py`, `seccomp.py`, `limits.py`: the means of confinement, over `linux.py`.

Invariant: what the zygote imports imports the standard library alone: the zygote has nothing else.
"""
