"""Languages in which programs of models can be written.

* `table.py`: one description for each.
* `toolchains.py`: those of this host, found by running them in the sandbox; `listing.py`: the same in words.
* `building.py`: from a source to jobs, compiled once.
* `sql.py`: the program that runs SQL.
"""
