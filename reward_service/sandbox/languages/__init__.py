"""Languages in which programs of models can be written.

`table.py`: one description for each; `toolchains.py`: what this host has of them, found by running it in the sandbox;
`building.py`: from a source to jobs, compiled once. `sql.py` is the program that runs SQL.
"""
