"""The workloads that benchmarks run: a model whose response lengths are known, prompts, and a configuration.

Both systems of a comparison load the same folder. The model has the Qwen3 architecture and is never trained beforehand.
Its embedding and output rows are set so that lengths follow a chosen law while every layer computes as usual:

- Each character belongs to a *mode*; the last character of a prompt picks it. A token is followed by tokens of its own
  mode only, all equally likely.
- In a mode the end token has a constant probability 1/mean, so lengths are geometric. A mode without a mean never ends,
  and its lengths are the token limit. Two modes with different means give a long tail.

Invariant: the learning rate of the benchmarks is so small that lengths keep this law during a run.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
LEARNING_RATE = 1e-6
_CALM, _WILD = "abcdefghijklm :", "nopqrstuvwxyz>"
_MARKERS = ":>"


@dataclass(frozen=True, slots=True)
class Mode:
    """One law of lengths: the share of prompts that follow it, and the mean in tokens (none: never ends)."""

    share: float
    mean: float | None


@dataclass(frozen=True, slots=True)
class Workload:
    """A model size, a law of lengths, and a batch."""

    name: str
    hidden: int
    layers: int
    max_tokens: int
    modes: tuple[Mode, ...]
    groups: int = 8
    n: int = 8

    @property
    def samples(self) -> int:
        """Responses per optimizer step."""
        return self.groups * self.n


_NEVER_ENDS = (Mode(1.0, None),)
LONG_TAIL = Workload("long-tail", 64, 2, 512, (Mode(0.8, 16.0), Mode(0.2, 192.0)))
WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("fixed-0.13m", 64, 2, 16, _NEVER_ENDS),
        Workload("fixed-0.5m", 128, 2, 64, _NEVER_ENDS),
        Workload("fixed-3.9m", 256, 4, 128, _NEVER_ENDS),
        Workload("geometric", 64, 2, 512, (Mode(1.0, 48.0),)),
        LONG_TAIL,
    )
}


def prepare(workload: Workload, folder: Path, *, rows: int = 4096, seed: int = 0) -> tuple[Path, Path]:
    """Writes the model folder and the prompts (JSONL with verl's fields); returns both paths."""
    model, data = folder / "model", folder / "prompts.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    write_prompts(workload, data, rows, seed)
    tokenizer = build_tokenizer()
    build_model(workload, tokenizer, seed).save_pretrained(model)
    tokenizer.save_pretrained(model)
    return model, data


def write_prompts(workload: Workload, path: Path, rows: int, seed: int = 0) -> None:
    """Prompts such as `say c:`; the ground truth is a letter of the prompt's mode."""
    rng = random.Random(seed)
    shares = [mode.share for mode in workload.modes]
    with path.open("w", encoding="utf-8") as out:
        for index in range(rows):
            mode = rng.choices(range(len(shares)), shares)[0]
            letter = rng.choice([c for c in _characters(mode, workload) if c.isalpha()])
            row = {
                "data_source": "benchmark/letters",
                "prompt": f"say {letter}{_MARKERS[mode]}",
                "ability": "letters",
                "reward_model": {"style": "rule", "ground_truth": letter},
                "extra_info": {"index": index, "mode": mode},
            }
            out.write(json.dumps(row) + "\n")


def mesh_config(workload: Workload, model: Path, data: Path, folder: Path, *, steps: int) -> dict[str, Any]:
    """The configuration of a run on one generator, as a mapping; callers lay their overrides over it."""
    return {
        "run": {"name": folder.name, "dir": str(folder.parent)},
        "model": {"path": str(model)},
        "data": {"train": str(data)},
        "algorithm": "grpo",
        "rollout": {
            "device": "cpu",
            "replicas": 1,
            "n": workload.n,
            "temperature": 1.0,
            "max_prompt_tokens": 16,
            "max_response_tokens": workload.max_tokens,
            "slots": workload.samples,
        },
        "reward": {"functions": [f"{Path(__file__).with_name('reward_functions.py')}:letter_order"]},
        "learner": {
            "device": "cpu",
            "steps": steps,
            "optimizer": {"lr": LEARNING_RATE, "max_grad_norm": 1.0},
            "batch": {"groups": workload.groups},
        },
        # The end of a run writes its checkpoint in any case; none falls into the measured window.
        "checkpoint": {"every_s": None},
        "logging": {"samples_per_step": 0},
        "network": {"metrics": False},
    }


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([PAD, EOS, UNK, *_CALM, *_WILD])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def build_model(workload: Workload, tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> Qwen3ForCausalLM:
    """A seeded float32 model whose response lengths follow `workload.modes`."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, set_seed

    set_seed(seed)
    heads = 4
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=workload.hidden,
        intermediate_size=4 * workload.hidden,
        num_hidden_layers=workload.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=workload.hidden // heads,
        max_position_embeddings=workload.max_tokens + 16,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config).float().eval()
    with torch.no_grad():
        _set_modes(model, workload, tokenizer)
    return model


def _set_modes(model: Qwen3ForCausalLM, workload: Workload, tokenizer: PreTrainedTokenizerFast) -> None:
    """Embedding: dimension 0 is 1 for every token, dimension 1 + k for those of mode k. Output rows read them back."""
    embedding, output = model.model.embed_tokens.weight, model.lm_head.weight
    modes = range(len(workload.modes))
    ids = [torch_ids(tokenizer, _characters(mode, workload)) for mode in modes]
    embedding[:, 0] = 1.0
    embedding[:, 1 : 1 + len(ids)] = 0.0
    output[:, : 1 + len(ids)] = 0.0
    for mode in modes:
        embedding[ids[mode], 1 + mode] = 1.0
        for other in modes:
            output[ids[mode], 1 + other] = 1.5 if other == mode else -1.5
    special = [tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.eos_token_id]
    output[special, 0] = -8.0  # about e^-40 against a letter: never sampled
    if any(mode.mean for mode in workload.modes):
        output[tokenizer.eos_token_id] = 0.0
        _calibrate_end(model, workload, ids, tokenizer.eos_token_id)


def _calibrate_end(model: Qwen3ForCausalLM, workload: Workload, ids: list[torch.Tensor], eos: int) -> None:
    """Moves the end token's row until its mean log-odds in each mode are those of the mode's mean length."""
    import torch

    output = model.lm_head.weight
    for _ in range(8):
        for mode, law in enumerate(workload.modes):
            if law.mean is None:
                raise ValueError("a mode without a mean cannot share a model with one that has a mean")
            length = min(workload.max_tokens, 64)
            tokens = ids[mode][torch.randint(len(ids[mode]), (16, length))]
            hidden = model.model(input_ids=tokens).last_hidden_state[:, 6:]
            found = (hidden @ output.T).log_softmax(-1)[..., eos].exp().mean()
            wanted = torch.tensor(1.0 / law.mean)
            output[eos, 1 + mode] += (wanted.logit() - found.logit()) / hidden[..., 1 + mode].mean()


def torch_ids(tokenizer: PreTrainedTokenizerFast, characters: str) -> torch.Tensor:
    """Token ids of characters, int64."""
    import torch

    return torch.tensor(tokenizer.convert_tokens_to_ids(list(characters)))


def _characters(mode: int, workload: Workload) -> str:
    return _CALM + _WILD if len(workload.modes) == 1 else (_CALM, _WILD)[mode]
