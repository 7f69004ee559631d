"""Answers of each command to odd model folders: writes the table of docs/model-folders.md.

    python -m benchmarks.folders.answers docs/model-folders.md

Every folder is made from a tiny random model. `sft` and `dpo` train one step on it, `run --dry-run` checks it, `eval`
and `generate` ask it a prompt. Each is a command of its own, as a user types it. An answer counts as refused where no
service has started, and no step was trained. Half an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.common import HelpFormatter
from benchmarks.folders.odd import ODD, REFUSED, TAKEN, TOLD, OddFolder, make_odd
from rollmesh.launcher.preloaded import PRELOADED_MODULES
from rollmesh.learner.algorithms.docs_reference import fill, markdown_table
from rollmesh.mesh.runtime.fork_server.client import ForkServer
from rollmesh.mesh.runtime.threads import thread_environment

COMMANDS = ("sft", "dpo", "run --dry-run", "eval", "generate")
_NAME = "model-folders"
_LIMIT_S = 600.0
_DATA_ERROR = 3
_ASKED = [{"role": "user", "content": "two plus two"}]
_SAID = [{"role": "assistant", "content": "four"}]
_OTHER = [{"role": "assistant", "content": "Paris"}]
_ROWS: Mapping[str, Mapping[str, object]] = {
    "sft": {"messages": [*_ASKED, *_SAID]},
    "dpo": {"prompt": _ASKED, "chosen": _SAID, "rejected": _OTHER},
    "run": {"prompt": _ASKED, "data_source": "arithmetic", "reward_model": {"ground_truth": "4"}},
}


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a command.

    Attributes:
        kind: `TAKEN`, `TOLD` or `REFUSED`; else the exit status, in words.
        text: all that it said.
    """

    kind: str
    text: str


def ask(server: ForkServer, command: str, model: Path, folder: Path, words: str) -> Answer:
    """Gives a model to a command.

    Args:
        server: forks the command.
        command: one of `COMMANDS`.
        model: the path to give.
        folder: for the command's files.
        words: of the notice or error that is expected; empty: none.
    """
    folder.mkdir(parents=True)
    arguments = _arguments(command, model, folder)
    command_line = [sys.executable, "-P", "-m", "rollmesh.cli", *arguments]
    with (folder / "said").open("w+b") as said, open(os.devnull, "rb") as nothing:
        files = {"stdin": nothing.fileno(), "stdout": said.fileno(), "stderr": said.fileno()}
        process = server.start(command_line, env=_environment(), cwd=folder, **files)
        assert process is not None, "it is forked: imports would take most of the time"
        status = process.wait(_LIMIT_S)
    text = "\n".join(map(_message, (folder / "said").read_text(encoding="utf-8").splitlines()))
    if status == 0:
        return Answer(TOLD if words and words in text else TAKEN, text)
    begun = any(any(folder.rglob(name)) for name in ("redis*", "checkpoints/*"))
    refused = status == _DATA_ERROR and not begun and words in text
    return Answer(REFUSED if refused else f"status {status}", text)


@cache
def _environment() -> dict[str, str]:
    """The commands' environment, as it was before libraries changed this process's."""
    return {**os.environ, **thread_environment(1), "HF_HUB_OFFLINE": "1"}


def _arguments(command: str, model: Path, folder: Path) -> list[str]:
    first = command.split()[0]
    rows = folder / "rows.jsonl"
    rows.write_text(f"{json.dumps(_ROWS.get(first, _ROWS['run']))}\n" * 4, encoding="utf-8")
    trained = {"optimizer": {"lr": 1e-3}, "steps": 1, "device": "cpu"}
    values: dict[str, object] = {"run": {"dir": str(folder)}, "model": {"path": str(model)}}
    if first in ("sft", "dpo"):
        values |= {"data": {"train": str(rows)}, "learner": trained | {"batch": {"rows": 2}}}
    else:
        values |= {
            "data": {"train": str(rows), "eval": str(rows)},
            "algorithm": "grpo",
            "rollout": {"engine": "hf", "device": "cpu", "n": 2, "max_prompt_tokens": 64, "max_response_tokens": 8},
            "reward": {"functions": ["arithmetic"]},
            "learner": trained | {"batch": {"groups": 2}},
        }
    config = folder / "cfg.yaml"
    config.write_text(json.dumps(values), encoding="utf-8")
    prompts = ["--prompt", "two plus two"] if first == "generate" else []
    return [*command.split()[:1], str(config), *command.split()[1:], *prompts]


def _message(line: str) -> str:
    """A line of a log in JSON as its message."""
    try:
        found = json.loads(line)
    except ValueError:
        return line
    return str(found.get("message", line)) if isinstance(found, dict) else line


def table(server: ForkServer, names: Sequence[str], each: Callable[[str, dict[str, Answer]], None]) -> str:
    """The table of some folders, as Markdown.

    Args:
        server: forks the commands.
        names: of the folders.
        each: called with the answers about each folder.
    """
    rows = []
    for name in names:
        odd = ODD[name]
        with tempfile.TemporaryDirectory() as scratch:
            root = Path(scratch)
            answers = {}
            for number, command in enumerate(COMMANDS):
                path = make_odd(name, root / f"{number}")
                answers[command] = ask(server, command, path, root / f"{number}" / "asked", odd.words)
        rows.append(_row(odd, answers))
        each(name, answers)
    return markdown_table(("folder", *(f"`{command}`" for command in COMMANDS), "what it says"), rows)


def _row(odd: OddFolder, answers: Mapping[str, Answer]) -> tuple[str, ...]:
    return (odd.about, *(answer.kind for answer in answers.values()), _said(odd.words, answers))


def _said(words: str, answers: Mapping[str, Answer]) -> str:
    """The sentence that most commands say, without paths."""
    lines = (
        re.sub(r"/\S*/", "", line).removeprefix("error: ")
        for answer in answers.values()
        for line in answer.text.splitlines()
        if words and words in line
    )
    common = Counter(lines).most_common(1)
    return common[0][0] if common else ""


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("page", type=Path, help="page with the markers of the table")
    parser.add_argument("--only", nargs="+", choices=ODD, default=list(ODD), help="these folders alone; printed")
    given = parser.parse_args(arguments)
    page: Path = given.page
    server = ForkServer.spawn(PRELOADED_MODULES, _environment())
    assert server is not None, "processes can be forked here"
    with server:
        made = table(server, given.only, _report)
    if given.only == list(ODD):
        page.write_text(fill(page.read_text(encoding="utf-8"), {_NAME: made}), encoding="utf-8")
    else:
        sys.stdout.write(f"{made}\n")


def _report(name: str, answers: Mapping[str, Answer]) -> None:
    odd = ODD[name]
    right = all(answer.kind == odd.answer for answer in answers.values())
    sys.stdout.write(f"{'as expected' if right else 'OTHERWISE'} {name}: ")
    sys.stdout.write(f"{' | '.join(_row(odd, answers))}\n")
    if not right:
        for command, answer in answers.items():
            if answer.kind != odd.answer:
                sys.stdout.write(f"--- {command}\n{answer.text[-1500:]}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
