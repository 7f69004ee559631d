"""Process reward models with a head of two layers, the form of Qwen2.5-Math-PRM (arXiv:2501.07301).

Their folders bring code of their own, which is not executed: the form is a decoder, and `score.0`, ReLU, `score.2`.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from rollmesh.mesh.errors import RewardError

_HEAD = ("score.0.weight", "score.0.bias", "score.2.weight", "score.2.bias")


class StepHeadModel(nn.Module):
    """A decoder with the head.

    Args:
        decoder: of transformers, without a head.
        head: weights and biases of both layers, by the names of `_HEAD`.
    """

    def __init__(self, decoder: Any, head: dict[str, Tensor]) -> None:
        super().__init__()
        first, last = head["score.0.weight"], head["score.2.weight"]
        self.config = decoder.config
        self.decoder = decoder
        self.score = nn.Sequential(
            nn.Linear(first.shape[1], first.shape[0]), nn.ReLU(), nn.Linear(last.shape[1], last.shape[0])
        )
        self.score.load_state_dict({name.removeprefix("score."): tensor for name, tensor in head.items()})
        self.score.to(next(decoder.parameters()).dtype)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        """Logits [B, T, labels] of token ids [B, T] under a mask [B, T]."""
        hidden = self.decoder(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        return SimpleNamespace(logits=self.score(hidden))


def load_step_head(folder: Path, opened: dict[str, Any]) -> StepHeadModel:
    """Loads such a model.

    Args:
        folder: of the model.
        opened: further arguments of `from_pretrained`.

    Raises:
        RewardError: it has no such head, or a decoder that transformers does not know.
    """
    import json

    from safetensors import safe_open
    from transformers import AutoConfig, AutoModel

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config.pop("auto_map", None)
    known = AutoConfig.for_model(config.pop("model_type"), **config)
    decoder = AutoModel.from_pretrained(folder, config=known, trust_remote_code=False, **opened).eval()
    head: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            head |= {name: file.get_tensor(name) for name in file.keys() if name in _HEAD}  # noqa: SIM118
    if missing := set(_HEAD) - head.keys():
        raise RewardError(f"reward model {folder} has no {', '.join(sorted(missing))}")
    return StepHeadModel(decoder, head).eval()
