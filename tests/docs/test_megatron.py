"""The page about Megatron-Core says what its engine does: messages, keys, families and the names for a new one."""

from __future__ import annotations

import inspect
import re
from importlib.util import find_spec
from typing import Any

import pytest
import yaml
from transformers import AutoConfig

from benchmarks.learner.equivalence import REFUSED as REFUSED_LAYOUT
from benchmarks.learner.megatron_equivalence import FIELDS
from rollmesh.learner.engines.interface import EngineSpec
from rollmesh.learner.engines.megatron.create import create_engine
from rollmesh.learner.engines.megatron.families import decoder, qwen3
from rollmesh.learner.engines.megatron.families.registry import FAMILIES, family_of
from rollmesh.learner.engines.megatron.parallel import ParallelSizes
from rollmesh.learner.engines.megatron.weight_rules import Form
from rollmesh.learner.engines.megatron.weights.weight_map import WeightMap
from rollmesh.learner.metrics.catalogue import CRITIC
from rollmesh.learner.start_requirements import check_start
from rollmesh.mesh.config import load_config
from rollmesh.mesh.config.inputs import ModelSection
from rollmesh.mesh.config.parallel import MegatronSection, ParallelSection
from rollmesh.mesh.errors import ConfigError
from rollmesh.planning.cluster import parse_devices
from rollmesh.planning.command import plan_run
from rollmesh.planning.report import lines
from tests.learner.engines.megatron.weights.map_cases import describe
from tests.repository import REPOSITORY

PAGE = (REPOSITORY / "docs" / "megatron.md").read_text(encoding="utf-8")
SMALL = {"num_hidden_layers": 5, "hidden_size": 64, "intermediate_size": 24, "vocab_size": 45, "sliding_window": None}
NO_ROOM = "does not fit"
ARCHITECTURES = REPOSITORY / "tests" / "rollmesh" / "planning" / "architectures"


def rows_after(heading: str) -> list[list[str]]:
    """Cells of the first table after a line, without its head; code without its quotes."""
    lines = PAGE.partition(heading)[2].splitlines()[1:]
    start = next(number for number, line in enumerate(lines) if line.lstrip().startswith("|"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.lstrip().startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        rows.append([cell[1:-1] if re.fullmatch(r"`[^`]*`", cell) else cell for cell in cells])
    return rows


REFUSED = rows_after("<!-- refused settings")
MODELS = rows_after("<!-- refused models")
LAYOUTS = rows_after("<!-- layouts: begin")


def test_the_page_has_many_refusals() -> None:
    assert len(REFUSED) >= 15
    assert len(MODELS) >= 3


@pytest.mark.parametrize(("model", "setting", "message", "hint"), REFUSED, ids=lambda cell: cell[:40])
def test_a_setting_is_refused_as_the_page_says(model: str, setting: str, message: str, hint: str) -> None:
    folder = ARCHITECTURES / model.lower()
    base = {"model": {"path": str(folder)}, "data": {"train": "t"}, "learner": {"engine": "megatron", "ranks": 8}}
    with pytest.raises(ConfigError) as refused:
        check_start(load_config(base, [setting]))
    assert refused.value.message.replace(str(folder), model) == message
    assert refused.value.hint == hint


@pytest.mark.parametrize(("model", "message"), MODELS, ids=lambda cell: cell[:40])
def test_a_model_is_refused_as_the_page_says(model: str, message: str) -> None:
    kind, *changes = re.findall(r"`([^`]+)`", model) or [model]
    config = AutoConfig.for_model(kind, **(yaml.safe_load(changes[0]) if changes else {}))
    with pytest.raises(ConfigError) as refused:
        family_of(config).settings(config)
    assert refused.value.message == message


@pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="Transformer Engine is here")
def test_the_message_without_transformer_engine_is_the_pages() -> None:
    with pytest.raises(ConfigError) as refused:
        create_engine(EngineSpec(ModelSection(path="nowhere"), None, 1, device="cuda"), "language_model")
    assert refused.value.message in " ".join(PAGE.split())


def test_the_page_has_every_key() -> None:
    divisions = rows_after("## Dividing a model")
    assert {key for key, *_ in divisions} == set(ParallelSection.model_fields) - {"shards"}
    for _, example, *_ in divisions:
        ParallelSection(**yaml.safe_load(example))
    assert {key: default for key, default, _ in rows_after("## Settings of Megatron alone")} == {
        f"learner.megatron.{name}": {None: "none", False: "false"}[field.default]
        for name, field in MegatronSection.model_fields.items()
    }


def test_its_metrics_are_in_the_catalogue() -> None:
    named = {f"<role>/{name}" for name in re.findall(r"`actor/(\w+_loss)`", PAGE)}
    assert len(named) == 2
    assert named <= {metric.name for metric in CRITIC}


def test_neighbours_share_a_matrix_and_stages_are_the_farthest() -> None:
    sizes = ParallelSizes(16, tp=2, pp=2, cp=2)
    places = [sizes.place_of(process) for process in range(16)]
    assert [place.tp for place in places] == [0, 1] * 8
    assert [place.cp for place in places] == [0, 0, 1, 1] * 4
    assert [place.dp for place in places] == [0, 0, 0, 0, 1, 1, 1, 1] * 2
    assert [place.pp for place in places] == [0] * 8 + [1] * 8
    example = ParallelSizes(8, tp=2, ep=8)
    assert (example.dp, example.edp) == (4, 1)


def test_all_layouts_are_as_near_as_their_page_says() -> None:
    page = (REPOSITORY / "docs" / "megatron-equivalence.md").read_text(encoding="utf-8")
    _, _, *rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    assert len(rows) >= 20
    differences = [cell.split(", ") for _, *cells in rows for cell in cells if cell != REFUSED_LAYOUT]
    assert all(len(cell) == len(FIELDS) for cell in differences)
    assert max(float(number) for cell in differences for number in cell) < 1e-5


def test_the_choice_of_an_engine_names_models_as_the_plan_finds_them() -> None:
    choice = (REPOSITORY / "docs" / "training-engines.md").read_text(encoding="utf-8")
    (shards,) = re.findall(r"64 H100 hold\s+(\S+) that way", choice)
    (others,) = re.findall(r"way\. (.+?) fit there only with Megatron", choice, re.DOTALL)
    found = {model: cells for model, devices, *cells in rows_after("<!-- layouts: begin") if devices == "64"}
    assert found[shards][0] != NO_ROOM
    for model in others.split(" and "):
        assert found[model][0] == NO_ROOM
        assert found[model][2] != NO_ROOM


@pytest.mark.parametrize(
    ("model", "devices"),
    [pytest.param("qwen3-30b-a3b", "8", marks=pytest.mark.exhaustive), ("llama-3.1-8b", "64")],
)
def test_the_commands_below_the_table_print_its_rows(model: str, devices: str) -> None:
    (written,) = [cells for name, count, *cells in LAYOUTS if (name.lower(), count) == (model, devices)]
    page = PAGE.partition("<!-- layouts: end -->")[2].partition("\n## ")[0].replace("\\\n", "")
    (minimal,) = re.findall(r"`(\{model: .*?\})`", page)
    (command,) = [line for line in page.splitlines() if f"--learner.ranks={devices}" in line]
    division, shards = (_planned(command, minimal, model, engine) for engine in ("megatron", "fsdp2"))
    (first,) = re.findall(r"\n  learner\.parallel: .*", division)[:1]
    sizes = re.findall(r"(\w+): (\d+)", first.partition("{")[2].partition("}")[0])
    dp, gib = re.findall(r"\}: dp (\d+), ([\d.]+) GiB", first)[0]

    assert ", ".join([*(f"{key} {value}" for key, value in sizes), f"dp {dp}"]) == written[2]
    assert float(gib) == pytest.approx(float(written[3]), abs=0.06)
    (peak,) = re.findall(r"learner's peak, all roles together: ([\d.]+) GiB", shards)
    assert float(peak) == pytest.approx(float(written[1]), abs=0.06)


def _planned(command: str, minimal: str, model: str, engine: str) -> str:
    """The output of a command of the page, for a model of the table."""
    words = command.replace("--devices ", "--devices=").replace("--nodes ", "--nodes=").split()
    given = dict(word.removeprefix("--").split("=", 1) for word in words if "=" in word)
    devices, nodes = given.pop("devices"), int(given.pop("nodes", "1"))
    given |= {"learner.engine": engine, "model.path": str(ARCHITECTURES / model)}
    config = load_config(yaml.safe_load(minimal), [f"{key}={value}" for key, value in given.items()])
    findings = plan_run(config, parse_devices(devices, nodes))
    return "\n" + "\n".join(lines(findings))


def test_the_page_has_every_family() -> None:
    assert {kind for kind, *_ in rows_after("## Families")} == {*FAMILIES, "all"}


def test_the_names_for_a_new_family_exist() -> None:
    guide = PAGE.partition("## How to add a family")[2].partition("\n### ")[0]
    assert [name for name in re.findall(r"`([A-Z_]+)`", guide) if name in Form.__members__] == list(Form.__members__)
    rules = re.findall(r"\(`(ENDS`.*?)`\)", guide)[0].replace("`", "").split(", ")
    assert len(rules) >= 6
    for name in (*rules, "decoder_settings", "expert_settings", "refusal"):
        assert hasattr(decoder, name), name
        assert name in guide
    (lines,) = re.findall(r"Qwen3's has (\d+) lines", guide)
    assert len(inspect.getsource(qwen3).splitlines()) == int(lines)


def test_the_family_of_the_example_has_a_place_for_each_weight() -> None:
    """The example is whole: no rule is missing."""
    code = re.findall(r"```python\n(.*?)```", PAGE.partition("## How to add a family")[2], re.DOTALL)[0]
    found: dict[str, Any] = {}
    exec(code, found)
    config = AutoConfig.for_model("mistral", **SMALL)
    described = describe(config)
    weights = WeightMap(found["MISTRAL"], config, ParallelSizes(1, layers=(5,)), described, 128)
    assert [full.name for full in weights.full_tensors()] == list(described)
