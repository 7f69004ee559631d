"""Configuration: overrides, nearest names, contradictions, and that loading it is cheap."""

import subprocess
import sys
from pathlib import Path

import pytest

from mesh.config import Config, load_config, parse_overrides
from mesh.config.models import Section
from mesh.errors import ConfigError

MINIMAL = {"model": {"path": "m"}, "data": {"train": "d.parquet"}}


def test_overrides_are_read_as_yaml_and_win(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: {path: m}\ndata: {train: d.parquet}\nlearner: {steps: 7}\nalgorithm: grpo\n")
    config = load_config(
        path, ["--learner.steps=9", "rollout.stop=['a','b']", "--algorithm.params.clip_low=0.1", "--run.name=x"]
    )
    assert config.learner.steps == 9
    assert config.rollout.stop == ["a", "b"]
    assert config.algorithm.name == "grpo"
    assert config.algorithm.params == {"clip_low": 0.1}
    assert config.run.folder == Path("runs/x")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("--rolout.n=4", ["unknown key rolout", "did you mean rollout?"]),
        ("--learner.optimizer.lrr=1", ["unknown key learner.optimizer.lrr", "did you mean learner.optimizer.lr?"]),
        ("--rollout.n=0", ["rollout.n", "greater than 0"]),
        ("--buffer.max_staleness=-1", ["buffer.max_staleness"]),
        ("--rollout.top_p=0.9", ["rollout.top_p", "off in training"]),
        ("--reward.timeout_s=100", ["deadlines must nest", "reward.timeout_s"]),
        ("--buffer.min_members=9", ["buffer.min_members (9) exceeds rollout.n (8)"]),
        ("--learner=3", ["learner"]),
        ("nonsense", ["--section.key=value"]),
        ("--a.b=[", ["not YAML"]),
    ],
)
def test_a_bad_key_or_value_is_named(override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(MINIMAL, [override])
    for word in words:
        assert word in str(caught.value)


def test_missing_sections_and_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing key model"):
        load_config({})
    with pytest.raises(ConfigError, match=r"cannot read configuration .*nowhere"):
        load_config(tmp_path / "nowhere.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match=r"expected a mapping"):
        load_config(tmp_path / "list.yaml")


def test_parse_overrides_keeps_equal_signs_in_values() -> None:
    assert parse_overrides(["--a.b=x=y"]) == {"a.b": "x=y"}


def _sections(model: type[Section]) -> list[type[Section]]:
    inner = [f.annotation for f in model.model_fields.values() if isinstance(f.annotation, type)]
    found = [i for i in inner if issubclass(i, Section)]
    return [model, *(s for i in found for s in _sections(i))]


def test_every_key_is_documented() -> None:
    bare = [f"{s.__name__}.{n}" for s in _sections(Config) for n, f in s.model_fields.items() if not f.description]
    assert bare == []


def test_loading_the_configuration_imports_nothing_heavy() -> None:
    code = "import sys, mesh.config; print([m for m in ('torch','transformers','grpc','numpy') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout.strip() == "[]"
