"""Files that run in the sandbox, with the standard library alone; there they are modules of one folder.

Next to the program: `calling.py` calls a function, `session.py` carries out what assertions ask of the program.
Next to the tests: `trial.py`, over `runner.py`, `link.py` and `pytest.py`. Next to both: `together.py`. All that passes
between program and tests is put into words by `values.py`.
"""
