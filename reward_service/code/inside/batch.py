"""Runs a program on one input after the other in this process, each time with a namespace and streams of its own.

Input: `{"file", "inputs": [...], "calls"}`; with `calls` the program gives its result to `rollmesh_channel`. Output: a
row `[number, output]` for each that has ended well. All else has to be run alone: a program that ends its process, or
uses descriptors of streams, or leaves something for the next input.
"""

from __future__ import annotations

import builtins
import io
import json
import sys
from types import CodeType, ModuleType

from loading import private_channel, put


def main() -> None:
    """Reads, runs, tells."""
    request = json.loads(sys.stdin.buffer.read())
    channel = private_channel()
    with open(request["file"], "rb") as file:
        code = compile(file.read(), request["file"], "exec", dont_inherit=True)
    for number, text in enumerate(request["inputs"]):
        output = _output(code, text, calls=request["calls"])
        if output is not None:
            put(channel, json.dumps([number, output]) + "\n")


def _output(code: CodeType, text: str, *, calls: bool) -> str | None:
    """Standard output, or the result, for an input; None if the program has not ended well."""
    module = ModuleType("__main__")
    module.__dict__.update(__file__=code.co_filename, __builtins__=builtins)
    sys.modules["__main__"] = module
    sys.argv[:] = [code.co_filename]
    written, result = io.BytesIO(), io.BytesIO()
    if calls:
        module.__dict__["rollmesh_channel"] = result.write
    sys.stdin = io.TextIOWrapper(io.BytesIO(text.encode()), "utf-8", "surrogateescape")
    sys.stdout = io.TextIOWrapper(written, "utf-8", "surrogateescape", write_through=True)
    try:
        exec(code, module.__dict__)  # noqa: S102
    except SystemExit as end:
        if end.code not in (None, 0):
            return None
    except BaseException:  # noqa: BLE001  # it is run again, alone
        return None
    return (result if calls else written).getvalue().decode(errors="replace")
