"""Rung 4: executors that leave confinement to another program or machine, all behind `Executor`.

* `turns.py`: what they share: how many programs run at once, deadlines, one run after the other.
* `commands.py`: runs of programs on this host by a confining program, over `execution.py`; `bubblewrap.py` and
  `gvisor.py` name it.
* `http_client.py`: requests to another machine; `sandbox_fusion.py` and `remote.py` are its uses.
* `server.py`: the other side of `remote.py`; `json_jobs.py`: what they say.
"""
