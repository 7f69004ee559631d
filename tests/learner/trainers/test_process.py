"""Trainings from their files to the folders that they leave."""

from __future__ import annotations

import json
import logging
import math
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rollmesh.export import export_adapter, export_checkpoint, latest_checkpoint
from rollmesh.learner.checkpoint.best import best_checkpoint
from rollmesh.learner.checkpoint.names import list_checkpoints
from rollmesh.learner.control_requests import ControlRequests
from rollmesh.learner.data.examples import Example, sequence_from
from rollmesh.learner.engines.fsdp2 import step
from rollmesh.learner.metrics.catalogue import describe
from rollmesh.learner.metrics.trackers import opening
from rollmesh.learner.metrics.writer import with_aliases
from rollmesh.learner.trainers import process
from rollmesh.learner.trainers.objectives.kto import mismatched
from rollmesh.mesh.errors import ConfigError, DataError, DivergedError
from rollmesh.reward_service.served_model.messages import ModelOptions
from rollmesh.reward_service.served_model.program import load
from rollmesh.run_files import read_any_config
from rollmesh.run_handle import Run
from rollmesh.trainers import read_trainer_config
from tests.learner.trainers.tiny import metrics, train

# An adapter with examples of two responses, and a preparation with examples of one. Those of `sft` come from several
# sources, in a test of their own.
COMMANDS: list[Any] = [
    ("rm", "rm", {"learner__lora": "{rank: 4}"}),
    ("dpo", "kto", {"loss__name": "kto"}),
    *(
        pytest.param(*each, marks=pytest.mark.exhaustive)
        for each in (
            ("sft", "sft", {}),
            ("dpo", "dpo", {"loss__name": "ipo", "learner__lora": "{rank: 4}"}),
            ("rm", "rm", {"loss__centering": 0.01}),
            ("dpo", "dpo", {"loss__sft_weight": 0.1}),
        )
    ),
]


def assert_same_folder(left: Path, right: Path) -> None:
    """Compares the folder that a training leaves with that which is exported of its last checkpoint."""
    assert sorted(path.name for path in left.iterdir()) == sorted(path.name for path in right.iterdir())
    for path in left.iterdir():
        assert path.read_bytes() == (right / path.name).read_bytes(), path.name


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "hf" / "last" / "model.safetensors")


def copied(run: Path, folder: Path) -> Path:
    """A copy of another test's run, for this one to continue."""
    return Path(shutil.copytree(run, folder / run.name, copy_function=shutil.copy2))


@pytest.fixture(scope="module")
def begun(chat_model: Path, row_files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training that was ended after its only step."""
    run = tmp_path_factory.mktemp("begun") / "run"
    assert train("sft", chat_model, row_files["sft"], run, learner__steps=1)
    return run


@pytest.fixture(scope="module")
def finished(
    begun: Path, chat_model: Path, row_files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The same, continued to two."""
    run = copied(begun, tmp_path_factory.mktemp("finished"))
    assert train("sft", chat_model, row_files["sft"], run, learner__steps=2)
    return run


@pytest.mark.parametrize(("command", "rows", "keys"), COMMANDS)
def test_a_run_that_was_stopped_continues_to_the_same_bits(
    command: str, rows: str, keys: dict[str, Any], chat_model: Path, row_files: dict[str, Path], tmp_path: Path
) -> None:
    # The last of three steps of ten rows begins the second epoch.
    given = keys | {"data__eval": row_files[rows], "eval__rows": 5, "learner__steps": 3}
    assert train(command, chat_model, row_files[rows], tmp_path / "whole", **given)
    assert not train(command, chat_model, row_files[rows], tmp_path / "parts", stop_after=2, **given)
    assert [record["step"] for record in metrics(tmp_path / "parts")] == [1, 2]
    assert not (tmp_path / "parts" / "hf").exists()
    assert train(command, chat_model, row_files[rows], tmp_path / "parts", **given)
    records, whole = metrics(tmp_path / "parts"), metrics(tmp_path / "whole")
    assert [record["actor/loss"] for record in records] == [record["actor/loss"] for record in whole]
    assert records[-1]["eval/loss"] == whole[-1]["eval/loss"]
    left, right = weights(tmp_path / "parts"), weights(tmp_path / "whole")
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    for record in whole:
        described = {name: value for name, value in record.items() if describe(name) is not None}
        assert record.keys() == with_aliases(described).keys()


def test_several_sources_are_trained_in_their_shares_and_evaluated_each(
    chat_model: Path, row_files: dict[str, Path], tmp_path: Path
) -> None:
    """One source of two is weighted three times the other; a run that was stopped continues to the same bits."""
    rows = row_files["sft"].read_text().splitlines(keepends=True)
    paths = {}
    for name, part in (("first", rows[:6]), ("second", rows[6:])):
        paths[name] = tmp_path / f"{name}.jsonl"
        paths[name].write_text("".join(part))
    weights_of = {"first": 3, "second": 1}
    named = [{"path": str(path), "name": name} for name, path in paths.items()]
    weighted = [{**source, "weight": weights_of[source["name"]]} for source in named]
    given: dict[str, Any] = {"data__train": json.dumps(weighted), "data__eval": json.dumps(named), "eval__rows": 10}
    given["learner__steps"] = 3
    assert train("sft", chat_model, tmp_path, tmp_path / "whole", **given)
    assert not train("sft", chat_model, tmp_path, tmp_path / "parts", stop_after=2, **given)
    assert train("sft", chat_model, tmp_path, tmp_path / "parts", **given)
    left, right = weights(tmp_path / "parts"), weights(tmp_path / "whole")
    assert all(torch.equal(left[name], right[name]) for name in left)
    last = metrics(tmp_path / "whole")[-1]
    first, second = (last[f"eval/loss/{name}"] for name in paths)
    assert min(first, second) < last["eval/loss"] < max(first, second)
    with pytest.raises(ConfigError, match=r"begun with something else: data\.train "):
        train("sft", chat_model, tmp_path, tmp_path / "parts", **given | {"data__train": json.dumps(named)})


def test_the_best_checkpoint_stays_and_is_left_as_a_folder(
    chat_model: Path, row_files: dict[str, Path], tmp_path: Path
) -> None:
    """A rate at which the loss grows again makes an earlier step the best one."""
    keys = {"data__eval": row_files["sft"], "eval__every_steps": 1, "checkpoint__keep": 1}
    run = tmp_path / "run"
    keys |= {"checkpoint__hf": "[best]", "learner__steps": 4, "learner__optimizer__lr": 0.3}
    assert train("sft", chat_model, row_files["sft"], run, **keys)
    found = [record["eval/loss"] for record in metrics(run)]
    best = best_checkpoint(run / "checkpoints")
    assert best is not None
    assert (best.version, best.value, best.metric) == (found.index(min(found)) + 1, min(found), "loss")
    assert best.version < 4
    assert [path.name for path in (run / "hf").glob("[!.]*")] == ["best"]
    model = load_file(run / "hf" / "best" / "model.safetensors")
    export_checkpoint(read_any_config(run), run / "checkpoints" / best.checkpoint, tmp_path / "exported")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert all(torch.equal(model[name], exported[name]) for name in model)


def test_an_end_that_the_model_does_not_name_is_told_and_named_by_what_is_left(
    chat_model: Path, row_files: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its template ends turns with `<end>`."""
    model, end = Path(shutil.copytree(chat_model, tmp_path / "model")), AutoTokenizer.from_pretrained(chat_model)
    named = {"eos_token_id": 0, "temperature": 0.6, "do_sample": True}
    (model / "generation_config.json").write_text(json.dumps(named))
    with caplog.at_level(logging.WARNING):
        assert train("sft", model, row_files["sft"], tmp_path / "run", learner__steps=1)
    assert f"training ends turns or texts with <end> ({end.eos_token_id})" in caplog.text
    left = json.loads((tmp_path / "run" / "hf" / "last" / "generation_config.json").read_text())
    assert left == named | {"eos_token_id": [0, end.eos_token_id]}
    assert_same_folder(tmp_path / "run" / "hf" / "last", Run(tmp_path / "run").export(tmp_path / "exported"))


def test_kto_estimates_with_the_responses_of_the_same_step() -> None:
    """(x1, y3), (x2, y1), (x3, y2); a pair that the model cannot take loses the end of its response."""
    examples = [Example((sequence_from([10 * place] * place, [place] * place, [1] * place),)) for place in (1, 2, 3)]
    found = [pair.sequences[0] for pair in mismatched(examples, longest=4)]
    assert [sequence.prompt_ids.tolist() for sequence in found] == [[10], [20, 20], [30, 30, 30]]
    assert [sequence.response_ids.tolist() for sequence in found] == [[3, 3, 3], [1], [2]]


def test_preferences_begin_where_the_reference_is(chat_model: Path, row_files: dict[str, Path], tmp_path: Path) -> None:
    """Before the first step the policy is the reference policy. With `sigmoid`: test_reference."""
    for name, rows, expected in (("ipo", "dpo", 25.0), ("kto", "kto", 0.5)):
        run = tmp_path / name
        assert train("dpo", chat_model, row_files[rows], run, loss__name=name, learner__steps=1)
        assert metrics(run)[0]["actor/loss"] == pytest.approx(expected, abs=1e-5)


def test_a_run_continues_with_the_same_data_and_order_alone(
    begun: Path, finished: Path, chat_model: Path, row_files: dict[str, Path]
) -> None:
    with pytest.raises(ConfigError, match=r"begun with something else: run\.seed ") as caught:
        train("sft", chat_model, row_files["sft"], begun, run__seed=1)
    assert "--fresh" in caught.value.hint
    assert [record["step"] for record in metrics(finished)] == [1, 2]


def test_settings_that_a_checkpoint_cannot_follow_are_refused_and_change_no_file(
    begun: Path, chat_model: Path, row_files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copied(begun, tmp_path)
    monkeypatch.setattr(process, "create_engine", lambda *_, **__: pytest.fail("the model is loaded"))
    before = contents(run)
    for name, value, words in (
        ("learner__optimizer__name", "muon", "optimizer of actor has name: muon, .* was written with adamw"),
        ("learner__optimizer__state_dtype", "8bit", "has state_dtype: 8bit, .* was written with float32"),
        ("learner__frozen", "[lm_head]", r"learner\.frozen is lm_head, .* was written with nothing"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            train("sft", chat_model, row_files["sft"], run, **{name: value})
        assert "rollmesh export" in caught.value.hint
        assert contents(run) == before


def test_a_checkpoint_that_cannot_be_loaded_leaves_the_folder_as_it_was(
    begun: Path, chat_model: Path, row_files: dict[str, Path], tmp_path: Path
) -> None:
    run = copied(begun, tmp_path)
    ((_, checkpoint),) = list_checkpoints(run / "checkpoints")
    (checkpoint / ".metadata").unlink()
    before = contents(run)
    with pytest.raises(DataError, match="cannot load checkpoint"):
        train("sft", chat_model, row_files["sft"], run, learner__steps=2, learner__optimizer__lr=1e-4)
    assert contents(run) == before


def contents(run: Path) -> dict[str, bytes]:
    """Every file of a run; files of trackers have a new one for each start."""
    files = [path for path in run.rglob("*") if path.is_file() and not path.name.startswith("events.out")]
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


def test_a_finished_training_is_left_as_it_is(
    finished: Path, chat_model: Path, row_files: dict[str, Path], tmp_path: Path
) -> None:
    """Also where fewer steps are asked for now."""
    run = copied(finished, tmp_path)
    folder, records, trained = run / "hf" / "last", metrics(run), weights(run)
    for steps in (2, 1):
        begun = folder.stat().st_mtime_ns
        assert train("sft", chat_model, row_files["sft"], run, learner__steps=steps)
        assert (folder.stat().st_mtime_ns, metrics(run)) == (begun, records)
    # A folder that is lost is written again, of what was trained.
    shutil.rmtree(folder)
    assert train("sft", chat_model, row_files["sft"], run, learner__steps=1)
    assert all(torch.equal(tensor, trained[name]) for name, tensor in weights(run).items())


def test_no_best_folder_is_left_where_no_evaluation_was_one(
    chat_model: Path, row_files: dict[str, Path], tmp_path: Path
) -> None:
    keys = {"data__eval": row_files["sft"], "eval__metric": "absent", "checkpoint__hf": "[last, best]"}
    assert train("sft", chat_model, row_files["sft"], tmp_path / "run", learner__steps=1, **keys)
    assert [path.name for path in (tmp_path / "run" / "hf").glob("[!.]*")] == ["last"]


def test_what_cannot_be_is_refused_before_the_model_is_loaded(
    begun: Path, chat_model: Path, row_files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def create(*_: object, **__: object) -> None:
        raise AssertionError("the model is loaded")

    monkeypatch.setattr(process, "create_engine", create)
    with pytest.raises(ConfigError, match=r"with something else: learner\.batch\.rows "):
        train("sft", chat_model, row_files["sft"], begun, learner__batch__rows=3)
    monkeypatch.setattr(opening.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"logging\.mlflow is on, but mlflow is not installed"):
        train("sft", chat_model, row_files["sft"], begun, logging__mlflow="true")


@pytest.mark.parametrize("at_once_s", [60.0, 0.0])
@pytest.mark.parametrize("side", ["train", "eval"])
def test_a_late_row_ends_a_training_before_its_first_step(
    chat_model: Path,
    row_files: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    side: str,
    at_once_s: float,
) -> None:
    """Small data are refused before the model is loaded; rows of large ones are read while it loads."""
    bad = tmp_path / "late.jsonl"
    lines = row_files["sft"].read_text().splitlines()[:10]
    bad.write_text("\n".join([*lines, '{"messages": "hello"}', *lines]))
    files = {"train": row_files["sft"], side: bad}
    monkeypatch.setattr(process, "_AT_ONCE_S", at_once_s)
    monkeypatch.setattr(process._Training, "_open_engine", lambda _: pytest.fail("loaded") if at_once_s else None)
    with pytest.raises(DataError, match=r"late\.jsonl, row 10: field `messages` is a text, and no JSON"):
        train("sft", chat_model, files["train"], tmp_path / "run", data__eval=files.get("eval", files["train"]))


def test_epochs_end_with_the_last_row(chat_model: Path, row_files: dict[str, Path], tmp_path: Path) -> None:
    """24 rows twice, 10 at a time."""
    keys = {"learner__steps": "null", "data__epochs": 2, "checkpoint__every_steps": 2, "checkpoint__keep": 1}
    assert train("sft", chat_model, row_files["sft"], tmp_path / "run", **keys)
    records = metrics(tmp_path / "run")
    assert [record["samples"] for record in records] == [10, 10, 10, 10, 8]
    assert records[-1]["epoch"] == 2.0
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("i*")] == ["i0001-v00000005"]


def test_a_reward_model_is_a_classifier_with_the_same_scores(
    chat_model: Path, row_files: dict[str, Path], tmp_path: Path
) -> None:
    assert train("rm", chat_model, row_files["rm"], tmp_path / "rm", data__eval=row_files["rm"], learner__steps=6)
    folder = tmp_path / "rm" / "hf" / "last"
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.num_labels == 1
    assert (folder / "tokenizer.json").read_bytes() == (chat_model / "tokenizer.json").read_bytes()
    prompts = ["<user>1+4=<end><assistant>", "<user>0+7=<end><assistant>"]
    pairs = [(prompt, response) for prompt in prompts for response in ("5", "7", "12")]
    # As the process of a reward service does that is given `model:FOLDER`.
    reader, judge = load(ModelOptions("response", str(folder), template="text"))
    scores = [score for (score,) in judge.values([reader.read((*pair, [])) for pair in pairs])]
    padded = tokenizer([f"{prompt}{response}<end>" for prompt, response in pairs], padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = model(padded["input_ids"], padded["attention_mask"]).logits[:, 0].tolist()
    assert scores == pytest.approx(expected, abs=1e-5)
    record = metrics(tmp_path / "rm")[-1]
    assert_same_folder(folder, Run(tmp_path / "rm").export(tmp_path / "exported"))
    assert len(set(map(round, scores, [6] * 6))) == 6
    assert record["eval/rewards/accuracies"] > 0.5


def test_peft_loads_the_adapter_of_a_reward_model_with_its_head(
    chat_model: Path, row_files: dict[str, Path], tmp_path: Path
) -> None:
    keys = {"learner__steps": 6, "learner__lora": "{rank: 4}", "data__eval": row_files["rm"]}
    assert train("rm", chat_model, row_files["rm"], tmp_path / "rm", **keys)
    left = tmp_path / "rm" / "hf"
    merged = AutoModelForSequenceClassification.from_pretrained(left / "last")
    base = AutoModelForSequenceClassification.from_pretrained(chat_model, num_labels=1, pad_token_id=0)
    loaded = PeftModel.from_pretrained(base, left / "last-adapter")
    ids = torch.arange(4, 12)[None]
    with torch.no_grad():
        found, expected = loaded(ids).logits, merged(ids).logits
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert metrics(tmp_path / "rm")[-1]["eval/rewards/accuracies"] > 0.5
    run = Run(tmp_path / "rm")
    assert_same_folder(left / "last", run.export(tmp_path / "exported"))
    export_adapter(run.config, latest_checkpoint(run.folder), tmp_path / "adapter")
    assert_same_folder(left / "last-adapter", tmp_path / "adapter")


def test_each_takes_the_folder_of_the_one_before(begun: Path, row_files: dict[str, Path], tmp_path: Path) -> None:
    """After `sft`."""
    model = begun / "hf" / "last"
    for place, command in enumerate(("dpo", "rm", "rm")):
        run = tmp_path / f"{place}-{command}"
        assert train(command, model, row_files[command], run, learner__steps=1)
        model = run / "hf" / "last"


def test_a_training_without_a_finite_gradient_leaves_neither_folder_nor_checkpoint(
    chat_model: Path, row_files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in pieces either; with one step that is taken it ends as others do."""
    keys: dict[str, Any] = {"learner__steps": 3, "checkpoint__every_steps": 1}
    run, clip = tmp_path / "run", step.clip_gradients
    monkeypatch.setattr(step, "clip_gradients", lambda *_: math.nan)
    assert not train("sft", chat_model, row_files["sft"], run, stop_after=2, **keys)
    with pytest.raises(DivergedError, match="none of 3 steps had a finite loss"):
        train("sft", chat_model, row_files["sft"], run, **keys)
    assert list_checkpoints(run / "checkpoints") == []
    assert not (run / "hf").exists()
    norms = iter([math.nan, None, math.nan])
    monkeypatch.setattr(step, "clip_gradients", lambda *given: next(norms) or clip(*given))
    assert train("sft", chat_model, row_files["sft"], run, **keys)
    assert [version.version for version, _ in list_checkpoints(run / "checkpoints")] == [2, 3]
    assert (run / "hf" / "last").is_dir()


def test_margins_with_which_the_loss_overflows_end_a_training_without_a_folder(
    chat_model: Path, row_files: dict[str, Path], tmp_path: Path
) -> None:
    """Each is a number of float32, and every gradient is finite."""
    rows = [json.loads(row) | {"margin": 3e38} for row in row_files["rm"].read_text().splitlines()]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DivergedError, match="none of 2 steps had a finite loss"):
        train("rm", chat_model, tmp_path / "rows.jsonl", tmp_path / "run", learner__steps=2)
    assert not (tmp_path / "run" / "hf").exists()


@pytest.mark.parametrize("as_chat", [False, True])
def test_texts_beside_a_chat_template_are_told_at_the_start(
    as_chat: bool, chat_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1+1=", "chosen": "2", "rejected": "3"}) + "\n")
    values = {"model": {"path": str(chat_model)}, "data": {"train": str(rows), "as_chat": as_chat}}
    config = read_trainer_config("dpo", {**values, "run": {"dir": str(tmp_path)}})
    with ExitStack() as closers:
        process._Training("dpo", config, ControlRequests(), closers)._note_texts()
    said = [record.message for record in caplog.records if "chat template is not used" in record.message]
    assert len(said) == (0 if as_chat else 1)
    assert all(message.endswith("set data.as_chat: true") for message in said)
