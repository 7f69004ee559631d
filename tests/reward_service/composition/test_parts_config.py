"""Parts of a reward in the configuration: what is read, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollmesh.mesh.config.load import load_config, save_config
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.config.scorers.parts import PartSection, describe, gate_of, part_names, uses
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.user_code import WITH_OPTION
from rollmesh.reward_service import scorers


def read(reward: dict[str, Any], *overrides: str) -> Config:
    return load_config({"model": {"path": "m"}, "data": {"train": "t"}, "reward": reward}, overrides)


def test_names_and_parts_stand_in_one_list(tmp_path: Path) -> None:
    part = {"use": "mine.py:style", "name": "style", "weight": -0.5, "gate": "math above 0.5", "clip": [0, 2]}
    config = read({"functions": ["math", part], "by_data_source": {"a": ["gsm8k"], "b": ["grpc://h:1"]}})
    assert uses(config.reward.functions) == ["math", "mine.py:style"]
    assert config.reward.uses == ["math", "mine.py:style", "gsm8k", "grpc://h:1"]
    assert part_names(config.reward.functions) == ["math", "style"]
    assert [describe(each) for each in config.reward.functions] == ["math", "-0.5 * mine.py:style if math above 0.5"]
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config
    assert read({}, "reward.functions=[qa, {use: regex:a, weight: 2}]").reward.functions == [
        "qa",
        PartSection(use="regex:a", weight=2),
    ]


def test_names_are_short_where_that_is_enough() -> None:
    assert part_names(["model:folder/x", "regex:a:b", "f.py:f", "m:g"]) == ["reward_model", "regex", "f", "g"]
    assert part_names(["a.py:f", "b.py:f", PartSection(use="c.py:f", name="g")]) == ["a.py:f#0", "b.py:f#1", "g"]
    assert set(WITH_OPTION) == scorers.WITH_OPTION.keys()


@pytest.mark.parametrize(
    ("text", "gate"),
    [("a", ("a", 0.0)), (" a above -1e3 ", ("a", -1000.0)), ("f.py:f#0", ("f.py:f#0", 0.0)), ("above", ("above", 0.0))],
)
def test_gates_are_read(text: str, gate: tuple[str, float]) -> None:
    assert gate_of(text) == gate


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ([{"use": "a", "weight": "much"}], r"reward\.functions\.0\.weight: needs a number, not a text"),
        ([{"use": "a", "weight": float("nan")}], r"reward\.functions\.0\.weight: needs a finite number"),
        ([{"use": "a", "wieght": 1}], r"unknown key reward\.functions\.0\.wieght, did you mean reward.*\.weight\?"),
        ([{"weight": 1}], r"missing key reward\.functions\.0\.use"),
        ([3], r"reward\.functions\.0: needs a section"),
        ([{"use": "a", "on_error": "skipp"}], r"did you mean skip\?"),
        ([{"use": "a", "on_error": "value"}], r"functions\.0: `on_error: value` and a number"),
        ([{"use": "a", "value": 1}], r"`on_error: value` and a number as `value` go together"),
        ([{"use": "a", "clip": [1, 1]}], r"functions\.0\.clip: needs \[low, high\] with low < high"),
        ([{"use": "a", "range": [-1e308, 1e308]}], r"functions\.0\.range: needs \[low, high\]"),
        ([{"use": "a", "name": "a/b"}], r"functions\.0\.name: needs some text without `/`"),
        ([{"use": "a", "gate": "b above all"}], r"functions\.0\.gate: needs `PART` or `PART above X` with a number"),
        (["a", {"use": "b", "gate": "c"}], r"functions: the gate of 'b' names no other part: 'c'; others: a"),
        (["a", {"use": "b", "gate": "a > 0.5"}], r"'a > 0.5'; others: a; a threshold is written `PART above X`"),
        (["a", {"use": "b", "gate": "b"}], r"the gate of 'b' names no other part: 'b'"),
        ([{"use": "a", "gate": "b"}, {"use": "b", "gate": "a"}], r"functions: gates form a cycle"),
        ([{"use": "a", "name": "x"}, {"use": "b", "name": "x"}], r"functions: several parts have the name 'x'"),
        ([{"use": "grpc://h:1"}], r"a part with options is a function, and not a service"),
        (["a", {"use": "b", "gate": "a"}, {"use": "c", "gate": "b"}], r"3 \* reward\.scorer_timeout_s < .*24 / 20"),
    ],
)
def test_what_cannot_be_is_refused_by_name(functions: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read({"functions": functions})
    with pytest.raises(ConfigError, match=message.replace("functions", r"by_data_source\.s")):
        read({"by_data_source": {"s": functions}})


def test_scales_of_sources_are_those_of_functions_here() -> None:
    with pytest.raises(ConfigError, match=r"normalize\.s: needs \[low, high\]"):
        read({"normalize": {"s": [1, 0]}})
    with pytest.raises(ConfigError, match=r"normalize\.s: a service scores this source"):
        read({"normalize": {"s": [0, 1]}, "by_data_source": {"s": ["grpc://h:1"]}})


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        ({"redis": "redis-cluster://h"}, r"reward\.cache\.redis: a cluster"),
        ({"redis": "redis://:word@h"}, r"reward\.cache\.redis: it holds a password"),
        ({"redis": "redis://h?password=word"}, r"reward\.cache\.redis: password stands after the '\?'"),
        ({"redis_password_file": "f"}, r"reward\.cache\.redis_password_file without reward\.cache\.redis"),
        ({"max_bytes": -1}, r"reward\.cache\.max_bytes"),
    ],
)
def test_a_cache_that_cannot_be_is_refused_without_its_password(cache: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        read({"cache": cache})
    assert "word@" not in str(refused.value)
    assert read({"cache": {"redis": "redis://user@h"}}).reward.cache.redis == "redis://user@h"
