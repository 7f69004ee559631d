"""A written folder says what its weights are: opened as its user opens it, it is the model that was trained."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from rollmesh.learner.model_files.folder_writer import write_folder
from rollmesh.learner.model_files.full_weights import read_full
from rollmesh.learner.model_files.stored_model import StoredModel
from rollmesh.learner.model_files.weight_files import SINGLE_NAME
from rollmesh.learner.written.folder import Expected, finish_folder
from rollmesh.mesh.errors import DataError
from rollmesh.testing.engine_cases import save_random
from tests import chat_templates as of

OTHER_END = of.CHATML.replace("<|im_end|>", "<|end|>")
TINY = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
TINY |= {"num_key_value_heads": 2, "max_position_embeddings": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose files name another end than its chat template writes."""
    folder = tmp_path_factory.mktemp("source") / "model"
    tokenizer = of.tokenizer_for(OTHER_END)
    save_random(AutoConfig.for_model("qwen2", **TINY, vocab_size=len(tokenizer), eos_token_id=0), folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def source(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "model"))


def written(source: Path, dtype: torch.dtype = torch.float32, name: str = "out") -> Path:
    """The same weights, written again, before anything is asked."""
    out = source.parent / name
    with StoredModel(source) as stored:
        write_folder(out, stored, stored.describe(), read_full(stored, dtype), dtype)
    return out


def edit(path: Path, drop: str = "", **values: Any) -> None:
    known = json.loads(path.read_text()) if path.is_file() else {}
    known.pop(drop, None)
    path.write_text(json.dumps(known | values))


@pytest.mark.parametrize(
    ("named", "after"), [(None, [0, "<|end|>"]), ([0], [0, "<|end|>"]), (["<|end|>"], None), ([], [0, "<|end|>"])]
)
def test_generation_stops_at_the_trained_end(
    source: Path, named: list[Any] | None, after: list[Any] | None, caplog: pytest.LogCaptureFixture
) -> None:
    known = of.tokenizer_for(OTHER_END).get_vocab()
    path = source / "generation_config.json"
    path.unlink()
    if named is not None:
        ids = [known.get(token, token) for token in named]
        edit(path, **({"eos_token_id": ids[0]} if ids else {}), temperature=0.6, do_sample=True)
    out = written(source)
    with caplog.at_level(logging.INFO):
        finish_folder(out, Expected(source, torch.float32))
    config = GenerationConfig.from_pretrained(out)
    own = known["<|im_end|>"]
    expected = [*({0} if named is None or 0 in named or not named else {known["<|end|>"]})]
    for token in (known["<|end|>"], own):
        expected += [token] if token not in expected else []
    assert config.eos_token_id == expected
    assert config.temperature == (None if named is None else 0.6)
    assert "<|im_end|>" in caplog.text
    assert ("<|end|>" in caplog.text) == (after is not None)
    # The model's configuration stays as it was.
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == 0


def test_sampling_is_kept_where_it_stood(source: Path) -> None:
    (source / "generation_config.json").unlink()
    edit(source / "config.json", temperature=0.7, top_p=0.9, do_sample=True, repetition_penalty=1.2, my_note="kept")
    out = written(source)
    finish_folder(out, Expected(source, torch.float32))
    config = GenerationConfig.from_pretrained(out)
    assert (config.temperature, config.top_p, config.do_sample, config.repetition_penalty) == (0.7, 0.9, True, 1.2)
    said = json.loads((out / "config.json").read_text())
    assert (said["temperature"], said["top_p"], said["my_note"]) == (0.7, 0.9, "kept")
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.generation_config.temperature == 0.7


def test_files_that_training_does_not_change_are_those_of_the_source(
    source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    carried = ["tokenizer.model", "special_tokens_map.json", "added_tokens.json", "LICENSE", "merges.txt"]
    left = ["README.md", "training_args.bin", "trainer_state.json", "adapter_config.json", "modeling_my.py"]
    for name in (*carried, *left):
        (source / name).write_text("{}" if name.endswith(".json") else name)
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text(OTHER_END)
    edit(source / "config.json", auto_map={"AutoModelForCausalLM": "modeling_my.My"}, architectures=["My"])
    edit(source / "processor_config.json", auto_map={"AutoProcessor": "processing_my.My"})
    out = written(source)
    with caplog.at_level(logging.INFO):
        finish_folder(out, Expected(source, torch.float32))
    assert "names code of the model's own" in caplog.text
    for name in (*carried, "tokenizer.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja"):
        assert (out / name).read_bytes() == (source / name).read_bytes(), name
    assert not any((out / name).exists() for name in left)
    assert "auto_map" not in json.loads((out / "processor_config.json").read_text())
    assert AutoConfig.from_pretrained(out, trust_remote_code=True).architectures == ["Qwen2ForCausalLM"]


def test_code_that_a_tokenizer_names_goes_along(source: Path) -> None:
    """Without the name of that code, transformers would choose another class for it."""
    edit(source / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_my.My", "org/name--other.My"]})
    for name in ("tokenization_my.py", "helper.py"):
        (source / name).write_text("# code")
    out = written(source)
    finish_folder(out, Expected(source, torch.float32))
    for name in ("tokenizer_config.json", "tokenization_my.py", "helper.py"):
        assert (out / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_of_several_parts_keeps_them(tmp_path: Path, dtype: torch.dtype) -> None:
    """Its vision tower, and layers that transformers itself leaves out."""
    linear = {f"linear_{name}": value for name, value in (("num_key_heads", 2), ("num_value_heads", 2))}
    linear |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "head_dim": 8}
    config = Qwen3_5Config(
        text_config={**TINY, **linear, "vocab_size": 64, "layer_types": ["full_attention"]},
        vision_config={"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16},
        tie_word_embeddings=False,
    )
    source = tmp_path / "model"
    Qwen3_5ForConditionalGeneration(config).save_pretrained(source)
    more = {"mtp.fc.weight": torch.randn(16, 32), "mtp.steps": torch.arange(3)}
    save_file(load_file(source / SINGLE_NAME) | more, source / SINGLE_NAME, {"format": "pt"})
    out = written(source, dtype)
    finish_folder(out, Expected(source, dtype))
    before = load_file(source / SINGLE_NAME)
    after = {name: tensor for path in out.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        trained = name.startswith(("model.language_model.", "lm_head."))
        assert torch.equal(after[name], tensor.to(dtype) if trained else tensor), name
    told = json.loads((out / "config.json").read_text())
    assert (told["model_type"], told["architectures"]) == ("qwen3_5", ["Qwen3_5ForConditionalGeneration"])
    assert told["dtype"] == str(dtype).removeprefix("torch.")
    _, found = Qwen3_5ForConditionalGeneration.from_pretrained(out, output_loading_info=True)
    assert not found["missing_keys"]
    # A training without these parts would not be the folder's.
    for name in (name for name in more if name != "mtp.steps"):
        after.pop(name)
        for path in out.glob("*.safetensors*"):
            path.unlink()
        save_file(after, out / SINGLE_NAME, {"format": "pt"})
    with pytest.raises(DataError, match=r"1 tensors of the model are missing, the first is mtp\.fc\.weight"):
        finish_folder(out, Expected(source, dtype))


@pytest.mark.parametrize("trained", [False, True])
def test_a_tensor_that_is_wider_than_the_rest_stays_so(source: Path, trained: bool) -> None:
    values = {name: tensor.bfloat16() for name, tensor in load_file(source / SINGLE_NAME).items()}
    wide = "model.norm.weight"
    values[wide] = torch.rand(16) + 1
    save_file(values, source / SINGLE_NAME, {"format": "pt"})
    edit(source / "config.json", dtype="bfloat16")
    out = source.parent / "out"
    with StoredModel(source) as stored:
        tensors = dict(read_full(stored, torch.bfloat16))
        if trained:
            tensors[wide] = tensors[wide] + 1
        write_folder(out, stored, stored.describe(), tensors.items(), torch.bfloat16)
    finish_folder(out, Expected(source, torch.bfloat16))
    after = {name: tensor for path in out.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert torch.equal(after[wide], tensors[wide].float() if trained else values[wide])


def _other_template(out: Path) -> None:
    (out / "chat_template.jinja").write_text(of.CHATML)


def _other_digits(out: Path) -> None:
    path = out / "tokenizer.json"
    known = json.loads(path.read_text())
    words = known["model"]["vocab"]
    words["1"], words["2"] = words["2"], words["1"]
    path.write_text(json.dumps(known))


def _lacks_weights(out: Path) -> None:
    tensors = load_file(out / SINGLE_NAME)
    del tensors["model.norm.weight"]
    save_file(tensors, out / SINGLE_NAME, {"format": "pt"})


def _other_dtype(out: Path) -> None:
    tensors = load_file(out / SINGLE_NAME)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].half()
    save_file(tensors, out / SINGLE_NAME, {"format": "pt"})


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_other_template, "the chat template is another one; a conversation has other tokens"),
        (_other_digits, "the tokenizer reads '1234567890 3.14' otherwise"),
        (_lacks_weights, r"lacks weights: model\.norm\.weight"),
        (_other_dtype, r"model\.norm\.weight is torch\.float16, and torch\.float32 was to be written"),
        (lambda out: edit(out / "generation_config.json", top_k=7), "generation has top_k 7, and .* None"),
        (lambda out: edit(out / "config.json", max_position_embeddings=32), "says max_position_embeddings 32, and 64"),
        (lambda out: edit(out / "config.json", dtype="bfloat16"), r"says dtype torch\.bfloat16"),
        (lambda out: edit(out / "config.json", auto_map={"AutoConfig": "a.B"}), r"config\.json names code"),
        (lambda out: (out / "generation_config.json").write_text("{"), r"generation_config\.json"),
    ],
)
def test_a_folder_that_is_not_what_was_trained_is_refused(
    source: Path, spoil: Callable[[Path], None], said: str
) -> None:
    out = written(source)
    spoil(out)
    with pytest.raises(DataError, match=said):
        finish_folder(out, Expected(source, torch.float32))
