"""Errors found in the log of an engine's processes."""

from __future__ import annotations

from pathlib import Path

from rollmesh.generators.engines.external.process_log import last_error, tail

_LOG = """\
[12:00:00] ValueError: no traceback
Traceback (most recent call last):
  File "server.py", line 1, in step
    raise ValueError("the first")
ValueError: the first

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "server.py", line 2, in step
torch.\x1b[1mOutOfMemoryError\x1b[0m: the last
[12:00:01] 5 more errors: Error
"""


def test_the_last_error_is_that_of_the_last_traceback(tmp_path: Path) -> None:
    file = tmp_path / "engine.log"
    assert (last_error(file), tail(file, 10)) == ("", "")
    file.write_text("KeyErrors: none\nan Error\n")
    assert last_error(file) == ""
    file.write_text(_LOG)
    assert last_error(file) == "torch.OutOfMemoryError: the last"
    assert tail(file, 6) == "Error\n"
    file.write_text(_LOG + "AssertionError\n" + "[12:00:02] busy\n" * 500)
    assert last_error(file) == "AssertionError"
    file.write_text("RuntimeError: " + "x" * 1000)
    assert last_error(file) == "RuntimeError: " + "x" * 286
