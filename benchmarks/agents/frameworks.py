"""Agent frameworks against the endpoint: which of them run unmodified, and which of their turns are trained.

    python -m benchmarks.agents.frameworks --page docs/endpoint.md --json frameworks.json

The frameworks are in an environment of their own (`make agent-clients`). Each runs as a process that knows nothing of
Rollmesh. It talks to an endpoint with a real engine, whose small model says what a script says: it calls a tool twice
and answers. Each case has a session of training. A framework trains every turn if the chain that ends in its last call
holds every answer that it got.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.agents.scripted import ANSWER, serving
from benchmarks.common import REPOSITORY, HelpFormatter, machine, table, write_json
from rollmesh.generators.engines.types import SamplingParams
from rollmesh.generators.openai_server.conversations.sessions import SamplingPolicy, Session
from tests.generators.openai_server.world import Serving

CLIENTS = REPOSITORY / ".venv-clients" / "bin" / "python"
HEADER = ("framework", "runs", "trains every turn", "tools", "structured output", "streaming")
_BEGIN, _END = "<!-- table of frameworks -->", "<!-- end of the table -->"
_PROGRAMS = Path(__file__).parent / "clients"
_FIRST = "<system>"
_PROGRAM_S = 300.0
# Characters of an error in the table.
_SHOWN = 100


@dataclass(frozen=True, slots=True)
class Framework:
    """A row of the table: the cases of a program by column.

    Attributes:
        name: in the table.
        program: in `clients/`.
        package: whose version is named.
        runs, tools, structured, streaming: cases; none: the framework has no such thing.
    """

    name: str
    program: str
    package: str
    runs: tuple[str, ...] = ("chat",)
    tools: tuple[str, ...] = ("tools",)
    structured: tuple[str, ...] = ("structured",)
    streaming: tuple[str, ...] = ("streaming", "streamed_tools")

    @property
    def columns(self) -> dict[str, tuple[str, ...]]:
        """Cases by column."""
        return {
            "runs": self.runs,
            "tools": self.tools,
            "structured output": self.structured,
            "streaming": self.streaming,
        }

    @property
    def cases(self) -> list[str]:
        """All cases, each once."""
        return list(dict.fromkeys(case for cases in self.columns.values() for case in cases))


FRAMEWORKS = (
    Framework("openai", "of_openai", "openai"),
    Framework("LiteLLM", "of_litellm", "litellm"),
    Framework("LangChain", "of_langchain", "langchain-openai", structured=("structured", "forced")),
    Framework("OpenAI Agents SDK", "of_openai_agents", "openai-agents"),
    Framework("Pydantic AI", "of_pydantic_ai", "pydantic-ai-slim", structured=("structured", "native")),
    Framework(
        "smolagents `CodeAgent`", "of_smolagents", "smolagents",
        runs=("chat", "code"), tools=("code",), streaming=("streaming", "streamed_code"),
    ),
    Framework("smolagents `ToolCallingAgent`", "of_smolagents", "smolagents", structured=()),
    Framework("DSPy", "of_dspy", "dspy", structured=("structured", "fields"), streaming=("streaming",)),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """A case that was run.

    Attributes:
        error: empty where the answer is right.
        answers: that the model gave.
        trained: of these, those in the trajectory.
        causes: why the others are not.
    """

    error: str
    answers: int
    trained: int
    causes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """A framework and its cases."""

    framework: str
    version: str
    cases: Mapping[str, Case]


@contextmanager
def endpoint() -> Iterator[Serving]:
    """An endpoint whose model follows the scripts."""
    with tempfile.TemporaryDirectory() as folder:
        world = serving(Path(folder))
        try:
            yield world
        finally:
            world.close()


def run(framework: Framework, world: Serving, folder: Path, python: Path = CLIENTS) -> Found:
    """Runs a framework's program.

    Args:
        framework: which.
        world: to talk to.
        folder: in which its packages may leave files.
        python: interpreter of the frameworks' environment.

    Raises:
        RuntimeError: the program ended without a result.
    """
    sessions = {case: _session(world) for case in framework.cases}
    ways = {
        case: {"base_url": f"{world.endpoint.server.agents_url}/sessions/{session.name}/v1", "api_key": session.key}
        for case, session in sessions.items()
    }
    # Packages ask for keys, proxies and places of caches in the environment.
    variables = {"PATH": os.environ.get("PATH", ""), "HOME": str(folder), "OPENAI_API_KEY": "none"}
    program = subprocess.run(
        [python, _PROGRAMS / f"{framework.program}.py"],
        input=json.dumps({"model": world.config.run.name, "cases": ways}),
        capture_output=True, text=True, cwd=folder, env=variables, timeout=_PROGRAM_S, check=False,
    )  # fmt: skip
    if program.returncode:
        raise RuntimeError(f"{framework.program} ended with {program.returncode}: {program.stderr[-2000:]}")
    said = json.loads(program.stdout[program.stdout.rindex('{"packages"') :])  # after what packages print
    cases = {case: _judged(said["cases"][case], session) for case, session in sessions.items()}
    for session in sessions.values():
        world.endpoint.sessions.forget(session)
    return Found(framework.name, f"{framework.package} {said['packages'][framework.package]}", cases)


def _session(world: Serving) -> Session:
    prompt = tuple(world.tokenizer.encode(_FIRST))
    sampling = SamplingParams(max_tokens=world.config.rollout.context_tokens - len(prompt), seed=9)
    return world.endpoint.sessions.open_training(SamplingPolicy(prompt, sampling))


def _judged(said: Mapping[str, Any], session: Session) -> Case:
    turns, chain = session.record.turns, session.record.chain()
    error = str(said.get("error", ""))
    if not error and ANSWER not in str(said["answer"]):
        error = f"it answered {said['answer']!r}"
    return Case(error, len(turns), len(chain), tuple(sorted(cause.value for cause in session.causes)))


def row(framework: Framework, found: Found) -> tuple[str, ...]:
    """The table's row of a framework."""
    cells = {column: _cell([found.cases[case] for case in cases]) for column, cases in framework.columns.items()}
    cells["framework"] = f"{framework.name} ({found.version})"
    cells["trains every turn"] = _trains(found.cases.values())
    return tuple(cells[column] for column in HEADER)


def _cell(cases: Sequence[Case]) -> str:
    errors = [case.error for case in cases if case.error]
    if errors:
        return "no: " + " ".join(errors[0].replace("|", "/").split())[:_SHOWN]
    return "yes" if cases else "has none"


def _trains(cases: Collection[Case]) -> str:
    partial = [case for case in cases if case.trained < case.answers]
    if not partial:
        return "yes" if all(case.answers for case in cases) else "no: calls without an answer"
    worst = max(partial, key=lambda case: case.answers - case.trained)
    return f"{worst.trained} of {worst.answers}: {', '.join(worst.causes)}"


def written(page: str, rows: Sequence[Sequence[str]]) -> str:
    """A page with the table of these rows in place of the one that it has."""
    before, after = page.partition(_BEGIN)[0], page.partition(_END)[2]
    lines = "\n".join(f"| {' | '.join(cells)} |" for cells in [HEADER, ("---",) * len(HEADER), *rows])
    return f"{before}{_BEGIN}\n{lines}\n{_END}{after}"


def read(page: str) -> list[tuple[str, ...]]:
    """The rows of a page's table, without its header."""
    lines = page.partition(_BEGIN)[2].partition(_END)[0].strip().splitlines()
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines[2:]]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--python", type=Path, default=CLIENTS, help="interpreter of the frameworks' environment")
    parser.add_argument("--json", type=Path, help="file for all findings")
    parser.add_argument("--page", type=Path, help="page whose table is written")
    options = parser.parse_args()
    if not options.python.exists():
        sys.exit(f"no {options.python}: make agent-clients")
    with endpoint() as world, tempfile.TemporaryDirectory() as folder:
        found = [run(framework, world, Path(folder), options.python.absolute()) for framework in FRAMEWORKS]
    rows = [row(framework, one) for framework, one in zip(FRAMEWORKS, found, strict=True)]
    print(table(HEADER, rows))
    if options.json is not None:
        write_json(options.json, machine() | {"frameworks": [asdict(one) for one in found]})
    if options.page is not None:
        options.page.write_text(written(options.page.read_text(encoding="utf-8"), rows), encoding="utf-8")


if __name__ == "__main__":
    main()
