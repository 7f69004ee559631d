"""The answer to a change of each key between two starts of a run: asked of the functions that a start asks.

`python -m rollmesh.launcher.preflight.key_changes docs/continuing.md` writes the tables of that page.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rollmesh.launcher.preflight.continuing import Continuation
from rollmesh.launcher.preflight.former_groups import former_groups
from rollmesh.learner.algorithms.interface import Algorithm
from rollmesh.learner.builders import build_algorithm
from rollmesh.learner.checkpoint.compatibility import algorithm_name, check_newest, trained_form
from rollmesh.learner.checkpoint.names import CHECKPOINTS_NAME
from rollmesh.learner.engines.interface import STATE_NAME
from rollmesh.learner.recovery.run_identity import RunRecord
from rollmesh.learner.trainers.beginning import Beginning
from rollmesh.learner.trainers.identity import KEY, identity_of
from rollmesh.mesh.config import load_as, load_config
from rollmesh.mesh.config.docs_reference import keys_of
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.config.trainers.configs import CONFIGS, TrainerConfig
from rollmesh.mesh.errors import ConfigError, DataError
from rollmesh.mesh.text import with_part
from rollmesh.report.changes import describe_changes

RUN = "run"
AT_ONCE, TOLD = "at once", "at once, told"
LATER = "from a step that is told"
REFUSED = "refused"
OTHER = "another run"
_BEGIN, _END = "<!-- keys: written by `make docs` -->", "<!-- end of keys -->"
_CHECKPOINT = "i0001-v00000001"
# Keys of sources that trainers refuse in any case.
_OF_RUNS = ("data.train.N.sampling", "data.train.N.ground_truth_key")
# Settings without which a key says nothing, by the beginning of its name.
_CONTEXTS: Mapping[str, Sequence[str]] = {
    "learner.lora.": ["learner.lora={}"],
    "learner.roles.": ["algorithm=ppo", "learner.roles.critic={}"],
    "buffer.max_reuse": ["buffer.max_staleness=3"],
    "eval.metric": ["data.eval=train.jsonl"],
    "data.curriculum": ["data.train=[train.jsonl, other.jsonl]", "learner.steps=3"],
    "checkpoint.hf": ["data.eval=train.jsonl"],
}
_FILES = ("train.jsonl", "other.jsonl", "curriculum.py")
_TEXTS = ("other", "other.py:f", "https://other", "5m", "<a>{}</a>")


def key_changes(command: str, folder: Path, known: Collection[str] = ()) -> dict[str, str]:
    """The answers to changes of the keys of a command, by key.

    Args:
        command: `run`, `sft`, `rm` or `dpo`.
        folder: for files that the run is made of; absent.
        known: keys that are left out.
    """
    kinds = {key: kind for key, kind, *_ in keys_of(Config if command == RUN else CONFIGS[command], "")}
    run = TriedRun(command, folder)
    return {key: run.answer(key, kind) for key, kind in kinds.items() if key not in known}


class TriedRun:
    """A run that has trained a step, and continues with one key changed at a time."""

    def __init__(self, command: str, folder: Path) -> None:
        self._command, self._folder = command, folder
        self._recorded_as: Config | None = None
        self._built: dict[str, Algorithm] = {}
        (folder / "model").mkdir(parents=True)
        (folder / "model" / "config.json").write_text('{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}')
        for name in _FILES:
            (folder / name).write_text("".join(json.dumps({"prompt": f"{name} {row}"}) + "\n" for row in range(8)))
        (folder / "other").mkdir()
        (folder / "other" / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')

    def pair(self, key: str, kind: str) -> tuple[Any, Any] | None:
        """Two configurations that differ in one key; None if it changes with others alone."""
        named = key.replace(".N.", ".0.").replace("NAME", "critic")
        context = next((own for start, own in _CONTEXTS.items() if named.startswith(start)), [])
        before = self._load(context)
        for value in self._others(named, kind):
            try:
                now = self._load([*context, _override(named, value)])
            except (ConfigError, DataError):
                continue
            if now != before:
                return before, now
        return None

    def answer(self, key: str, kind: str) -> str:
        """The answer to a change of a key."""
        if self._command != RUN and key.startswith(_OF_RUNS):
            return ""
        if (pair := self.pair(key, kind)) is not None:
            return self._answer(*pair)
        return self._recorded(key.replace(".N.", ".0."), self._load([]))

    def _load(self, overrides: Iterable[str]) -> Any:
        values = {
            "run": {"dir": str(self._folder)},
            "model": {"path": str(self._folder / "model")},
            "data": {"train": str(self._folder / "train.jsonl")},
        }
        placed = list(overrides)
        for name in _FILES:
            placed = [each.replace(name, str(self._folder / name)) for each in placed]
        if self._command == RUN:
            config = load_config(values, placed)
            # It refuses what cannot be with any run.
            self._algorithm(config)
            return config
        return load_as(CONFIGS[self._command], values, placed, command=self._command)

    def _algorithm(self, config: Config) -> Algorithm:
        """The algorithm of a configuration; one that is tried out takes a while."""
        plan = (config.learner.steps, config.learner.batch, config.buffer.max_staleness, config.run.seed)
        named = repr((config.algorithm, plan, config.rollout, config.learner.roles, config.learner.lora, config.reward))
        if named not in self._built:
            self._built[named] = build_algorithm(config)
        return self._built[named]

    def _others(self, key: str, kind: str) -> Iterator[Any]:
        """Other values for a key; some may contradict the rest."""
        if key == "model.path":
            yield str(self._folder / "other")
        if key == "algorithm.name":
            yield "ppo"
        if key.endswith(".optimizer"):
            yield {"name": "muon"}
        if key == "data.curriculum":
            yield "curriculum.py:weights"
        if key in ("data.train", "data.train.0.path"):
            yield "other.jsonl"
        if "`" in kind:
            yield from (option.strip(" `") for option in kind.split("\\|"))
        numbers = (2, 3, 1, 7, 64, 4096, 0.5, 0.25, 0.05, 2.5)
        lists = ([1], [0.5], [0.5, 0.25], [0, 1], *([text] for text in _TEXTS), [{"path": "train.jsonl"}])
        if kind.startswith("true"):
            yield from (True, False)
        if kind.startswith(("integer", "number")):
            yield from numbers
        if kind.startswith(("text", "path")):
            yield from _TEXTS
        if "list" in kind:
            yield from lists
        if kind == "any":
            yield from (*numbers, *_TEXTS)
        yield from ({}, {"other": 1}, {"other": "math"})

    def _answer(self, before: Any, now: Any) -> str:
        if before.run.folder != now.run.folder:
            return OTHER
        changed = describe_changes(before.model_dump(mode="json"), now.model_dump(mode="json"))
        try:
            later = self._continue(before, now)
        except (ConfigError, DataError):
            return REFUSED
        return LATER if later else TOLD if changed else AT_ONCE

    def _continue(self, before: Any, now: Any) -> bool:
        """Continues as a start does; returns whether groups stay as they were.

        Raises:
            ConfigError, DataError: it is refused.
        """
        if isinstance(before, TrainerConfig):
            self._checkpoint(before, {KEY: identity_of(self._command, before), **trained_form(before.learner)})
            Beginning.find(self._command, now)
            return False
        if before != self._recorded_as:
            RunRecord(before, Path(before.model.path)).write()
            self._recorded_as = before
        algorithm = self._algorithm(before)
        named = {"name": algorithm_name(algorithm), "state": {}}
        stored = {"algorithm": named, **trained_form(before.learner, algorithm)}
        self._checkpoint(before, stored, *(role.name for role in algorithm.needs.roles if role.trained))
        RunRecord(now, Path(now.model.path)).check(allow_changes=False)
        found = Continuation.of(now)
        check_newest(now.run.folder / CHECKPOINTS_NAME, self._algorithm(now), now.learner)
        return found is not None and found.former is not None

    def _checkpoint(self, config: Any, extra: Mapping[str, Any], *roles: str) -> None:
        folder = config.run.folder / CHECKPOINTS_NAME / _CHECKPOINT
        for name in roles:
            (folder / name).mkdir(parents=True, exist_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / STATE_NAME).write_text(json.dumps({"steps": 1, "extra": extra}))

    def _recorded(self, key: str, config: Any) -> str:
        """The answer for a key that goes with others alone: its record is changed in its place."""
        values = config.model_dump(mode="json")
        at = former = json.loads(json.dumps(values))
        *sections, name = key.split(".")
        for section in sections:
            if not isinstance(at.get(section), dict):
                at[section] = {}
            at = at[section]
        at[name] = "former"
        changes = describe_changes(former, values)
        keys = [change.split(" ")[0] for change in changes]
        if self._command == RUN and former_groups(values, config, keys, edited=False, step=1, trained=1):
            return LATER
        return TOLD if changes else AT_ONCE


def _override(key: str, value: Any) -> str:
    """One key as an override; that of a source gives the whole list of sources."""
    start, number, rest = key.partition(".0.")
    if not number or not start.startswith("data."):
        return f"{key}={json.dumps(value)}"
    for name in reversed(rest.split(".")):
        value = {name: value}
    return f"{start}={json.dumps([{'path': 'train.jsonl', **value}])}"


def reference(scratch: Path) -> str:
    """The table of all keys: one row for the keys of a section that have one answer.

    Args:
        scratch: folder for the runs that are tried.
    """
    trained: dict[str, str] = {}
    for command in CONFIGS:
        trained |= key_changes(command, scratch / command, trained)
    ran = key_changes(RUN, scratch / RUN)
    answers = {key: (ran.get(key, ""), trained.get(key, "")) for key in (*ran, *(set(trained) - set(ran)))}
    rows: dict[tuple[str, tuple[str, str]], list[str]] = {}
    for name, answer in _joined(answers):
        section, _, key = name.rpartition(".")
        rows.setdefault((section, answer), []).append(f"`{key}`")
    lines = ["| section | keys | `run` | `sft`, `rm`, `dpo` |", "|---|---|---|---|"]
    for (section, answer), keys in rows.items():
        lines.append(f"| {f'`{section}`' if section else ''} | {', '.join(keys)} | {' | '.join(answer)} |")
    return "\n".join(lines) + "\n"


def _joined(answers: Mapping[str, tuple[str, str]], prefix: str = "") -> Iterator[tuple[str, tuple[str, str]]]:
    """The answers by key, or by section where all of its keys have one."""
    for name, group in groupby(sorted(answers), key=lambda key: key.removeprefix(prefix).split(".")[0]):
        inside = {key: answers[key] for key in group}
        whole = prefix + name
        if len(set(inside.values())) == 1:
            yield whole, next(iter(inside.values()))
            continue
        if whole in inside:
            yield whole, inside.pop(whole)
        yield from _joined(inside, f"{whole}.")


def with_reference(page: str) -> str:
    """A page with the table between its marks."""
    with tempfile.TemporaryDirectory() as scratch:
        return with_part(page, _BEGIN, _END, reference(Path(scratch)))


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_reference(path.read_text(encoding="utf-8")), encoding="utf-8")
