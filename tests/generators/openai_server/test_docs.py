"""The examples of docs/endpoint.md run as they stand there."""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
import sys
from pathlib import Path

from rollmesh.generators.program_agents.process import CommandProgram, FunctionProgram, LaunchContext, Outcome, Program
from tests.generators.openai_server.world import Serving
from tests.repository import REPOSITORY
from tests.secrets_here import write_secret

DOCS = REPOSITORY / "docs" / "endpoint.md"
TALK, FUNCTION, COMMAND = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
TASK = {"messages": [{"role": "user", "content": "the quick fox"}], "ground_truth": ""}


def outcome(program: Program, serving: Serving) -> Outcome:
    way = LaunchContext(f"{serving.url}/v1", "none", serving.config.run.name)
    return asyncio.run(program(TASK, way, timeout_s=60.0))


def test_talking_to_the_model(serving: Serving, tmp_path: Path) -> None:
    key = write_secret(tmp_path / "key")
    assert "http://127.0.0.1:8011/v1" in TALK
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(TALK.replace("http://127.0.0.1:8011", serving.url).replace("runs/demo/endpoint.key", str(key)), {})
    assert re.search(r" 1:0 \d+\n$", printed.getvalue())


def test_an_agent_that_is_a_function(serving: Serving, tmp_path: Path) -> None:
    file = tmp_path / "my_agent.py"
    file.write_text(FUNCTION)
    program = FunctionProgram(f"{file}:solve", 1)
    try:
        found = outcome(program, serving)
    finally:
        program.close()
    assert found.rewards == {"reward": 1.0}


def test_an_agent_that_is_a_command(serving: Serving, tmp_path: Path) -> None:
    file = tmp_path / "my_agent.py"
    file.write_text(COMMAND)
    found = outcome(CommandProgram([sys.executable, str(file)], 1), serving)
    assert found.rewards is None
    assert isinstance(found.answer, str)
