"""The engine of transformers, and the reader of texts: in this process, against the plain model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from rollmesh.mesh.errors import RewardError
from rollmesh.reward_service.served_model.local import LocalModel
from rollmesh.reward_service.served_model.messages import ModelOptions, Text
from rollmesh.reward_service.served_model.program import load
from tests.reward_service.tiny_models import CHAT_TEMPLATE, write_model

STEPS: Text = ("1+1=", ["2", "so 2", "it is 2"], [])


def values(options: ModelOptions, *texts: Text) -> list[list[float]]:
    reader, engine = load(options)
    return engine.values([reader.read(text) for text in texts])


def logits(kind: Any, folder: Path, text: str) -> torch.Tensor:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.inference_mode():
        return kind.from_pretrained(folder)(torch.tensor([tokenizer.encode(text)])).logits[0]


@pytest.mark.parametrize("padding", [None, "1", "<end>"])
def test_a_classifier_sees_all_tokens_whatever_pads(padding: str | None, tmp_path: Path) -> None:
    """A tokenizer without a padding token pads with one that prompts may hold."""
    folder = write_model(tmp_path / "model", padding=padding)
    found = values(ModelOptions("response", str(folder)), ("1+1=", "2", []), ("1+1=", "222", []))
    for response, (score,) in zip(("2", "222"), found, strict=True):
        plain = logits(AutoModelForSequenceClassification, folder, f"1+1={response}<end>")
        # A classifier reads its score before an end that is padding to it.
        assert score == pytest.approx(plain.item(), abs=1e-5)


def test_the_chat_template_of_the_model_and_its_label_are_used(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", labels=3, chat_template=CHAT_TEMPLATE)
    messages = [{"role": "user", "content": "3*3"}]
    options = ModelOptions("response", str(folder), label="LABEL_2", activation="softmax")
    ((found,),) = values(options, ("<another template>", "9", messages))
    plain = logits(AutoModelForSequenceClassification, folder, "3*3=9")
    assert found == pytest.approx(plain.softmax(-1)[2].item(), abs=1e-5)
    with pytest.raises(RewardError, match="has no chat template"):
        load(ModelOptions("response", str(write_model(tmp_path / "plain")), template="chat"))


def test_a_token_classifier_judges_each_step_at_its_separator(tmp_path: Path) -> None:
    kind = AutoModelForTokenClassification
    folder = write_model(tmp_path / "model", kind, labels=2)
    options = ModelOptions("steps", str(folder), separator="<step>", activation="softmax")
    short: Text = ("1+1=", ["2"], [])
    found = values(options, STEPS, short)
    plain = logits(kind, folder, "1+1=2<step>so 2<step>it is 2<step>").softmax(-1)[:, 1]
    assert found[0] == pytest.approx([plain[place].item() for place in (5, 10, 18)], abs=1e-5)
    assert found[1] == pytest.approx([found[0][0]], abs=1e-5)


def test_a_causal_model_judges_by_two_tokens(tmp_path: Path) -> None:
    kind = AutoModelForCausalLM
    folder = write_model(tmp_path / "model", kind)
    options = ModelOptions("steps", str(folder), separator="<step>", activation="softmax", good="+", bad="-")
    (found,) = values(options, STEPS)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    columns = tokenizer.convert_tokens_to_ids(["-", "+"])
    plain = logits(kind, folder, "1+1=2<step>so 2<step>it is 2<step>")[:, columns].softmax(-1)[:, 1]
    assert found == pytest.approx([plain[place].item() for place in (5, 10, 18)], abs=1e-5)
    with pytest.raises(RewardError, match="is a causal language model"):
        load(ModelOptions("steps", str(folder), separator="<step>"))


def test_a_head_of_two_layers_is_read_without_executing_its_folder(tmp_path: Path) -> None:
    """The form of Qwen2.5-Math-PRM."""
    import json

    from safetensors.torch import load_file, save_file

    folder = write_model(tmp_path / "model", AutoModelForCausalLM)
    torch.manual_seed(1)
    head = {"0.weight": (16, 16), "0.bias": (16,), "2.weight": (2, 16), "2.bias": (2,)}
    added = {f"score.{name}": torch.randn(shape) for name, shape in head.items()}
    path = folder / "model.safetensors"
    save_file({**load_file(path), **added}, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["Qwen2ForProcessRewardModel"], "auto_map": {"AutoModel": "absent.Absent"}}
    (folder / "config.json").write_text(json.dumps(config))
    options = ModelOptions("steps", str(folder), separator="<step>", activation="softmax")
    (found,) = values(options, STEPS)
    from transformers import AutoModel

    config["architectures"] = ["Qwen3ForCausalLM"]
    del config["auto_map"]
    (folder / "config.json").write_text(json.dumps(config))
    ids = AutoTokenizer.from_pretrained(folder).encode("1+1=2<step>so 2<step>it is 2<step>")
    with torch.inference_mode():
        hidden = AutoModel.from_pretrained(folder)(torch.tensor([ids])).last_hidden_state[0]
        inner = (hidden @ added["score.0.weight"].T + added["score.0.bias"]).relu()
        plain = (inner @ added["score.2.weight"].T + added["score.2.bias"]).softmax(-1)[:, 1]
    assert found == pytest.approx([plain[place].item() for place in (5, 10, 18)], abs=1e-5)


def test_a_label_that_is_not_named_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "three", labels=3)
    with pytest.raises(RewardError, match="has 3 labels"):
        LocalModel(ModelOptions("response", str(folder)), AutoTokenizer.from_pretrained(folder))
