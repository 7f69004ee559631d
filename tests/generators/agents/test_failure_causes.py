"""An agent's failure says its cause, not the frames of its traceback."""

from __future__ import annotations

import pytest

from rollmesh.generators.agents.values import cause_of, describe_error

TRACEBACK = """Traceback (most recent call last):
  File "/agent.py", line 9, in <module>
    client.chat.completions.create(model="m", messages=[])
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~^^^^^^^^^^^^^^^^^^^^^^^
  [Previous line repeated 996 more times]
"""
REFUSED = "openai.BadRequestError: Error code: 400 - {'message': 'Tool call IDs should be 9 characters'}"
LONG = "ValidationError: 1 error for X\nfield\n  Input should be a text"
NODE = """/agent.js:1
    throw new Error("lost");
    ^

Error: lost
    at Module._compile (node:1)

Node.js v20.11.0
"""
GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "/agent.py", line 5, in <module>
  |     asyncio.run(main())
  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/agent.py", line 2, in f
    |     raise ValueError("deep")
    | ValueError: deep
    +------------------------------------
"""
IGNORED = (
    "Exception ignored in: <function Client.__del__ at 0x7f>\n" + TRACEBACK + "RuntimeError: Event loop is closed\n"
)


@pytest.mark.parametrize(
    ("printed", "cause"),
    [
        (TRACEBACK + REFUSED + "\n", REFUSED),
        (f"{TRACEBACK}KeyError: 'a'\n\nThe above exception was the cause of:\n\n{TRACEBACK}{REFUSED}", REFUSED),
        (f"{TRACEBACK}{LONG}\n", LONG),
        (GROUP, "ValueError: deep"),
        (f"{TRACEBACK}{REFUSED}\n{IGNORED}", REFUSED),
        (f"{IGNORED}{TRACEBACK}{REFUSED}\n", REFUSED),
        ("usage: agent [-h] task\nagent: error: unrecognized: --fast\n", "agent: error: unrecognized: --fast"),
        (NODE, "Error: lost"),
        ("lost", "lost"),
        ("  lost\n", "lost"),
        ("Traceback (most recent call last):", ""),
        ("", ""),
    ],
)  # fmt: skip
def test_the_cause_is_what_ended_the_program(printed: str, cause: str) -> None:
    assert cause_of(printed) == cause


def test_an_error_that_brings_a_traceback_is_told_by_its_end() -> None:
    assert describe_error(RuntimeError(f"in a worker:\n{TRACEBACK}{REFUSED}")) == f"RuntimeError: {REFUSED}"
    assert describe_error(ExceptionGroup("several", [ValueError("deep"), KeyError("b")])) == "ValueError: deep"
    assert describe_error(ValueError("two\nlines")) == "ValueError: two\nlines"
