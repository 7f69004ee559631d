"""The parts of a run are known by content: a run may move, and it may not become another in silence."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rollmesh.learner.evaluation.measurement_identity import measured_by
from rollmesh.learner.recovery import run_identity
from rollmesh.learner.recovery.run_identity import CONFIG, RunRecord, fingerprint, nothing_trained
from rollmesh.mesh.config import Config, load_config
from rollmesh.mesh.errors import ConfigError, DataError

ROW = {"prompt": "1+1=", "data_source": "arithmetic", "reward_model": {"ground_truth": "2"}}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name in ("base", "tuned"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(name.ljust(8).encode())
    for name, truth in (("train", "2"), ("other", "3")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({**ROW, "reward_model": {"ground_truth": truth}}))
    return tmp_path


def make(files: Path, *overrides: str, name: str | None = "a") -> tuple[Config, RunRecord]:
    config = load_config(
        {
            "run": {"dir": str(files / "runs"), **({"name": name} if name else {})},
            "model": {"path": str(files / "base")},
            "data": {"train": str(files / "train.jsonl")},
        },
        overrides,
    )
    model = Path(config.model.path)
    return config, RunRecord(config, model if model.is_dir() else None)


def test_a_run_continues_with_what_it_is_of_wherever_that_is_now(files: Path) -> None:
    config, record = make(files)
    record.check(allow_changes=False)
    assert not config.run.folder.exists(), "nothing is kept before a learner has taken the run over"
    record.write()
    assert load_config(config.run.folder / CONFIG) == config
    make(files)[1].check(allow_changes=False)
    (files / "base").rename(files / "moved")
    (files / "train.jsonl").rename(files / "moved.jsonl")
    make(files, f"model.path={files / 'moved'}", f"data.train={files / 'moved.jsonl'}")[1].check(allow_changes=False)


@pytest.mark.parametrize("text", ["{}", "[]", '{"model.path": 3}', "{"])
def test_a_damaged_record_is_named(files: Path, text: str) -> None:
    config, record = make(files)
    record.write()
    (config.run.folder / run_identity.INPUTS).write_text(text)
    with pytest.raises(DataError, match=r"inputs\.json (cannot be read|is damaged)"):
        make(files)[1].check(allow_changes=False)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja", "merges.txt"])
def test_prompts_are_part_of_the_model(files: Path, name: str) -> None:
    make(files)[1].write()
    (files / "base" / name).write_text("{}")
    with pytest.raises(ConfigError, match=r"model\.path .* with another content"):
        make(files)[1].check(allow_changes=False)


@pytest.mark.parametrize(
    "agent", ["tools=['{}:look']", "environment='{}:World'", "program='{}:main'", "command=[python, '{}', --fast]"]
)
def test_an_agent_that_was_edited_is_told_and_measures_otherwise(files: Path, agent: str) -> None:
    code = files / "agent.py"
    code.write_text("first")
    given = f"rollout.agent.{agent.format(code)}"
    config, record = make(files, given)
    record.write()
    before = measured_by(config)
    assert make(files, given)[1].edited_files() == []
    code.write_text("second")
    assert make(files, given)[1].edited_files() == [str(code)]
    assert measured_by(config) != before


def test_rewards_and_held_out_data_that_were_edited_are_told(files: Path) -> None:
    reward, held_out = files / "reward.py", files / "other.jsonl"
    reward.write_text("def score(solution_str, ground_truth): return 1.0")
    routed = files / "routed.py"
    routed.write_text(reward.read_text())
    schema = files / "schema.json"
    schema.write_text("{}")
    rest = (
        f"reward.functions=['{reward}:score', math, 'json_schema:{schema}', 'regex:{'a' * 300}']",
        f"reward.by_data_source={{a: ['{routed}:score'], b: ['grpc://127.0.0.1:9']}}",
        f"data.eval={held_out}",
    )
    make(files, *rest)[1].write()
    assert make(files, *rest)[1].edited_files() == []
    reward.write_text("def score(solution_str, ground_truth): return 100.0")
    routed.write_text(reward.read_text())
    schema.write_text("false")
    held_out.write_text(held_out.read_text() * 2)
    record = make(files, *rest)[1]
    record.check(allow_changes=False)
    assert record.edited_files() == [str(reward), str(schema), str(routed), str(held_out)]
    assert make(files)[1].edited_files() == [], "what is not used any more the configuration says"


@pytest.mark.parametrize("key", ["model.path", "data.train", "data.prompt_key"])
def test_another_model_or_other_data_are_refused_unless_they_are_allowed(files: Path, key: str) -> None:
    """The two models have equal shapes, as a base and a tuned model have."""
    make(files)[1].write()
    values = {
        "model.path": str(files / "tuned"),
        "data.train": str(files / "other.jsonl"),
        "data.prompt_key": "question",
    }
    changed, record = make(files, f"{key}={values[key]}")
    with pytest.raises(ConfigError, match=f"{key} was .*, now it is {values[key]}") as refused:
        record.check(allow_changes=False)
    assert all(way in refused.value.hint for way in ("--run.name", "--fresh", "--allow-changes"))
    record.check(allow_changes=True)
    record.write()
    make(files, f"{key}={values[key]}")[1].check(allow_changes=False)
    assert load_config(changed.run.folder / CONFIG) == changed


@pytest.mark.parametrize("allow_changes", [True, False])
def test_checkpoints_bind_a_run_to_their_architecture_whatever_is_allowed(files: Path, allow_changes: bool) -> None:
    for name, size in (("base", 64), ("tuned", 32)):
        (files / name / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": size}))
    config, record = make(files)
    record.write()
    other = f"model.path={files / 'tuned'}"
    make(files, other)[1].check(allow_changes=True)
    (config.run.folder / "checkpoints" / "i0001-v00000003").mkdir(parents=True)
    with pytest.raises(
        ConfigError, match=r"another architecture \(llama: hidden_size 64\) than .*hidden_size 32"
    ) as no:
        make(files, other)[1].check(allow_changes=allow_changes)
    assert "--allow-changes" not in no.value.hint
    (files / "tuned" / "config.json").write_text((files / "base" / "config.json").read_text())
    make(files, other)[1].check(allow_changes=True)


@pytest.mark.parametrize(
    ("checkpoint", "log", "nothing"),
    [
        (None, None, True),
        ("i0001-v00000000", b"", True),
        ("i0001-v00000000", b"{}\n", False),
        ("i0001-v00000001", None, False),
    ],
)
def test_nothing_was_trained_where_no_batch_was_used(
    tmp_path: Path, checkpoint: str | None, log: bytes | None, nothing: bool
) -> None:
    if checkpoint is not None:
        (tmp_path / "checkpoints" / checkpoint).mkdir(parents=True)
    if log is not None:
        (tmp_path / "consumption.jsonl").write_bytes(log)
    assert nothing_trained(tmp_path) == nothing


def test_a_file_that_was_changed_in_place_is_another_one(files: Path) -> None:
    make(files, name=None)[1].write()
    (files / "other.jsonl").replace(files / "train.jsonl")
    with pytest.raises(ConfigError, match="with another content") as refused:
        make(files, name=None)[1].check(allow_changes=False)
    assert "run.name is not set" in refused.value.hint


def test_hub_ids_are_known_by_name_and_revision_where_they_are_not_here(files: Path) -> None:
    make(files, "model.path=org/name", "model.revision=v1")[1].write()
    make(files, "model.path=org/name", "model.revision=v1")[1].check(allow_changes=False)
    with pytest.raises(ConfigError, match=r"model\.path was org/name@v1, now it is org/name@v2"):
        make(files, "model.path=org/name", "model.revision=v2")[1].check(allow_changes=False)


def test_large_files_are_known_by_samples_up_to_their_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_identity, "_WHOLE_BYTES", 1 << 20)
    path, other = tmp_path / "a", tmp_path / "b"
    path.write_bytes(os.urandom(9 << 20))
    other.write_bytes(path.read_bytes())
    assert fingerprint([path]) == fingerprint([other])
    for place in (0, 4 << 20, (9 << 20) - 1):
        changed = bytearray(path.read_bytes())
        for offset in range(place, min(place + (64 << 10), len(changed))):
            changed[offset] ^= 1
        other.write_bytes(changed)
        assert fingerprint([path]) != fingerprint([other]), place


def test_what_decides_the_order_of_several_sources_is_part_of_the_run(files: Path) -> None:
    first, second = files / "train.jsonl", files / "other.jsonl"
    code = files / "plan.py"
    code.write_text("def curriculum(progress): return {'a': 1.0}")

    def sources(*weights: float | None, path: Path = second) -> str:
        parts = [
            {"path": str(path), "name": name, **({"weight": weight} if weight else {})}
            for path, name, weight in zip((first, path), "ab", weights, strict=True)
        ]
        return f"data.train={json.dumps(parts)}"

    make(files, sources(1, 2))[1].write()
    second.rename(files / "moved.jsonl")
    make(files, sources(1, 2, path=files / "moved.jsonl"))[1].check(allow_changes=False)
    with pytest.raises(ConfigError, match=r"data\.train was .*train\.jsonl, .*other\.jsonl, now it is"):
        make(files, sources(1, 3, path=files / "moved.jsonl"))[1].check(allow_changes=False)
    planned = (sources(None, None, path=files / "moved.jsonl"), f"data.curriculum={code}:curriculum")
    with pytest.raises(ConfigError, match=r"now it is .* by .*plan\.py:curriculum"):
        make(files, *planned)[1].check(allow_changes=False)
    make(files, *planned)[1].write()
    make(files, *planned)[1].check(allow_changes=False)
    code.write_text("def curriculum(progress): return {'b': 1.0}")
    with pytest.raises(ConfigError, match="with another content"):
        make(files, *planned)[1].check(allow_changes=False)
