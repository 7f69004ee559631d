"""Whatever the page of other projects' options names as ours is a key of ours, and takes the value that it is given."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollmesh.cli.explanations.algorithms import expanded_settings, part_settings
from rollmesh.learner.algorithms.registry import ADVANTAGES, ALGORITHMS, POLICY_LOSSES
from rollmesh.learner.algorithms.settings import Component
from rollmesh.learner.builders import build_algorithm
from rollmesh.mesh.config import load_as, load_config
from rollmesh.mesh.config.base import Section, holds_several, section_of
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.config.trainers.configs import CONFIGS
from rollmesh.mesh.errors import ConfigError

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "coming-from.md"
MINIMAL = {"model": {"path": "m"}, "data": {"train": "t"}}
SECTIONS = "|".join([*Config.model_fields, "loss"])
OF_RUNS, _, OF_TRAINERS = PAGE.read_text().partition("## TRL: trainers on data")


def named(page: str) -> list[str]:
    """Code spans of right columns that begin with one of our sections."""
    rows = [line.strip("|").split(" | ", 1)[1] for line in page.splitlines() if line.startswith("| ")]
    spans = [span for row in rows for span in re.findall(r"`([^`]+)`", row)]
    return sorted({span for span in spans if re.match(rf"({SECTIONS})[.:=]", span)})


def keys(section: type[Section], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        if inner is None or holds_several(field.annotation):
            yield prefix + name
        if inner is not None:
            yield from keys(inner, f"{prefix}{name}.")


def algorithm_keys() -> set[str]:
    """Settings of all presets, and of all estimators and losses."""
    found = set()
    for name in ALGORITHMS.names:
        config = load_config({**MINIMAL, "algorithm": name})
        found |= {".".join(("algorithm", *path)) for path, _ in expanded_settings(build_algorithm(config).settings)}
    for kind, registry in (("advantage", ADVANTAGES), ("loss", POLICY_LOSSES)):
        for name in registry.names:
            found |= {".".join(("algorithm", *path)) for path, _ in part_settings(Component(name), (kind,))}
    return found


def test_the_page_names_many_settings() -> None:
    assert len([span for span in named(OF_RUNS) if span.startswith("algorithm")]) > 80


def test_keys_exist() -> None:
    known = set(keys(Config)) | algorithm_keys()
    bare = [span for span in named(OF_RUNS) if not re.search(r"[=:]", span)]
    assert [key for key in bare if key not in known] == []


def test_keys_of_trainers_exist_and_take_their_values() -> None:
    known = {key for config in CONFIGS.values() for key in keys(config)}
    found = named(OF_TRAINERS)
    assert len(found) > 30
    for span in found:
        if "=" not in span:
            assert span in known
        else:
            taken = False
            for command, model in CONFIGS.items():
                with contextlib.suppress(ConfigError):
                    load_as(model, {**MINIMAL, "data": {"train": "t", "eval": "e"}}, [span], command=command)
                    taken = True
            assert taken, f"no command takes {span}"


@pytest.mark.parametrize("span", [span for span in named(OF_RUNS) if re.search(r"[=:]", span)])
def test_values_are_taken(span: str) -> None:
    """By at least one algorithm: which one a setting belongs to is said in the text."""
    override = span.replace(": ", "=", 1) if span.startswith("algorithm: ") else span
    for name in ALGORITHMS.names:
        with contextlib.suppress(ConfigError):
            build_algorithm(load_config({**MINIMAL, "algorithm": name}, [override]))
            return
    pytest.fail(f"no algorithm takes {span}")
