"""The scorers `code` and `code_fraction`: a response holds a program, and the row holds tests for it.

* `programs.py`: the program of a response; `rows.py`: the tests of a row, in the forms of published datasets.
* `comparing.py`: what a program has put out against what was expected; `verdicts.py`: how cases ended.
* `cases.py`: programs run on inputs and functions called, case by case; `checkers.py`: special judges.
* `scripts.py`: assertions and test files. They run in another process than the program.
* `inside/`: the files that run in the sandbox, next to the program or to its tests.
* `workplace.py`: the sandbox of a process that scores; `scorer.py`: the scorers.

Invariants: what is expected never enters the program's process (but for `same_process`); what the infrastructure did
is never scored.
"""
