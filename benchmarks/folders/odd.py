"""Model folders that are odd in one way each, and the answer that each should get of every command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.folders import changes
from benchmarks.folders.changes import Change
from benchmarks.folders.plain import SINGLE, WEIGHT, write_plain

TAKEN, TOLD, REFUSED = "taken", "taken, and told", "refused"


@dataclass(frozen=True, slots=True)
class OddFolder:
    """A folder that is odd in one way.

    Attributes:
        about: the oddity, in words.
        answer: `TAKEN`, `TOLD` or `REFUSED`.
        words: a part of what is said.
        make: from a plain folder; returns the path to give, where it is another.
        remedy: follows the error's hint, after which the folder is taken; None: there is nothing to follow here.
    """

    about: str
    answer: str
    words: str
    make: Change
    remedy: Change | None = None


_FREQUENCIES = [f"model.layers.{number}.self_attn.rotary_emb.inv_freq" for number in (0, 1)]
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}

ODD: dict[str, OddFolder] = {
    "plain": OddFolder("nothing is odd", TAKEN, "", changes.nothing),
    "float16": OddFolder(
        "stored in float16",
        TAKEN,
        "",
        changes.cast_all(torch.float16),
    ),
    "shards": OddFolder("two files and an index", TAKEN, "", changes.in_shards),
    "index-lacks": OddFolder("an index that lacks a tensor of its files", TAKEN, "", changes.index_lacks),
    "bin-too": OddFolder("`pytorch_model.bin` beside", TOLD, "pytorch_model.bin", changes.as_bin),
    "consolidated": OddFolder(
        "`consolidated.safetensors` beside",
        TOLD,
        "consolidated.safetensors",
        changes.with_copy("consolidated.safetensors"),
    ),
    "bin-only": OddFolder("`pytorch_model.bin` alone", REFUSED, "has no weights", changes.only_bin),
    "two-sets": OddFolder(
        "an old index beside `model.safetensors`",
        REFUSED,
        "two sets of weights",
        changes.stale_index,
        changes.without_index,
    ),
    "shard-missing": OddFolder(
        "a file that the index names is not there", REFUSED, "lacks model-00001", changes.first_shard
    ),
    "shard-cut": OddFolder("a file that is cut off", REFUSED, "cut off or damaged", changes.halved),
    "header-cut": OddFolder(
        "a file that ends in its header", REFUSED, "no readable header", lambda folder: changes.cut(folder, SINGLE, 20)
    ),
    "pointer": OddFolder(
        "a pointer of Git LFS",
        REFUSED,
        "pointer of Git LFS",
        changes.pointer,
    ),
    "nan": OddFolder(
        "a NaN",
        REFUSED,
        "model.norm.weight has numbers that are not finite",
        changes.number(float("nan")),
        changes.number(1.0),
    ),
    "infinite": OddFolder(
        "an infinite weight, in bfloat16",
        REFUSED,
        f"{WEIGHT} has numbers that are not finite",
        changes.infinite,
    ),
    "tied-equal": OddFolder("a tied head, stored too", TAKEN, "", lambda folder: changes.tied(folder, alike=True)),
    "tied-other": OddFolder(
        "a tied head of other values",
        REFUSED,
        "which its config.json ties",
        lambda folder: changes.tied(folder, alike=False),
        changes.configured(tie_word_embeddings=False),
    ),
    "no-head": OddFolder(
        "no head, and the configuration ties none",
        REFUSED,
        "lacks weights: lm_head.weight",
        changes.dropped("lm_head.weight"),
        changes.configured(tie_word_embeddings=True),
    ),
    "layer-missing": OddFolder(
        "a layer's weight is missing", REFUSED, f"lacks weights: {WEIGHT}", changes.dropped(WEIGHT)
    ),
    "unknown-tensor": OddFolder(
        "a tensor that the model does not know",
        REFUSED,
        "weights that are not used: model.extra.weight",
        changes.added("model.extra.weight"),
    ),
    "two-names": OddFolder(
        "a tensor under two names", REFUSED, "a second tensor for what the model has once", changes.doubled
    ),
    "other-width": OddFolder(
        "another width in the configuration",
        REFUSED,
        "another shape than config.json says",
        changes.configured(hidden_size=64),
    ),
    "sight-and-mtp": OddFolder(
        "sight and `mtp.*` of a Qwen3.5", TOLD, "model.visual.* (21), mtp.* (2)", changes.with_sight
    ),
    "mtp": OddFolder(
        "`mtp.*` beside a model of text", TOLD, "mtp.* (2)", changes.added("mtp.fc.weight", "mtp.norm.weight")
    ),
    "next-token-layer": OddFolder(
        "a layer after the last one, for the next token (DeepSeek)", TOLD, "model.layers.2.* (2)", changes.next_layer
    ),
    "inv-freq": OddFolder(
        "rotary frequencies, stored as they were of old", TOLD, "rotary_emb.* (2)", changes.added(*_FREQUENCIES)
    ),
    "awq": OddFolder(
        "AWQ in the configuration",
        REFUSED,
        "quantized weights (quantization_config",
        changes.configured(quantization_config=_AWQ),
    ),
    "fp8": OddFolder(
        "fp8 in the configuration",
        REFUSED,
        "quantized weights (quantization_config",
        changes.configured(quantization_config=_FP8),
    ),
    "fp8-tensors": OddFolder(
        "fp8 weights, and nothing in the configuration",
        REFUSED,
        "is stored as F8_E4M3",
        changes.cast(WEIGHT, torch.float8_e4m3fn),
    ),
    "gptq-tensors": OddFolder(
        "GPTQ weights, and nothing in the configuration", REFUSED, "q_proj.qweight", changes.stored(changes.gptq)
    ),
    "int8": OddFolder("weights in int8", REFUSED, "is stored as I8", changes.cast(WEIGHT, torch.int8)),
    "code-unknown": OddFolder(
        "code of its own for an unknown type",
        REFUSED,
        "needs custom code",
        lambda folder: changes.with_code(folder, "own_type", "OwnForCausalLM"),
    ),
    "code-known": OddFolder(
        "code of its own for a known type",
        REFUSED,
        "code of its own, OwnForCausalLM",
        lambda folder: changes.with_code(folder, "qwen3", "OwnForCausalLM"),
        changes.builtin,
    ),
    "code-alike": OddFolder(
        "code that transformers has too",
        TOLD,
        "transformers' Qwen3ForCausalLM takes its place",
        lambda folder: changes.with_code(folder, "qwen3", "Qwen3ForCausalLM"),
    ),
    "unknown-type": OddFolder(
        "a type that transformers does not know",
        REFUSED,
        "cannot load model",
        changes.configured(model_type="own_type"),
    ),
    "classifier": OddFolder(
        "a classifier",
        REFUSED,
        "scores texts and generates none",
        changes.configured(architectures=["Qwen3ForSequenceClassification"]),
    ),
    "special-beyond": OddFolder(
        "a special token without a row of the embedding",
        REFUSED,
        "'<tool_call>'",
        changes.with_token("<tool_call>", special=True),
        changes.resized,
    ),
    "token-beyond": OddFolder(
        "an ordinary token without a row",
        REFUSED,
        "'<tool_call>'",
        changes.with_token("<tool_call>", special=False),
        changes.resized,
    ),
    "slow-beyond": OddFolder(
        "a token without a row, in `added_tokens.json` of a tokenizer of old", REFUSED, "'<tool_call>'", changes.slow
    ),
    "pad-beyond": OddFolder(
        "a padding token without a row", TAKEN, "", changes.with_token("[PAD]", special=True, pad=True)
    ),
    "image-beyond": OddFolder(
        "a text model's mark of an image without a row",
        TAKEN,
        "",
        changes.with_token("<image_soft_token>", special=True),
    ),
    "other-class": OddFolder(
        "a tokenizer class that reads its file otherwise",
        TOLD,
        "texts otherwise than tokenizer.json",
        changes.other_class,
    ),
    "no-tokenizer": OddFolder(
        "no tokenizer", REFUSED, "has no tokenizer", changes.removed("tokenizer.json", "tokenizer_config.json")
    ),
    "tokenizer-damaged": OddFolder(
        "a damaged `tokenizer.json`",
        REFUSED,
        "tokenizer.json cannot be read",
        lambda folder: changes.cut(folder, "tokenizer.json", 100),
    ),
    "gguf": OddFolder("a `.gguf` file", REFUSED, "GGUF", changes.gguf, lambda path: path.parent),
    "weights-file": OddFolder(
        "the path of `model.safetensors`",
        REFUSED,
        "is a file, and a model is a folder",
        lambda folder: folder / SINGLE,
        lambda path: path.parent,
    ),
    "adapter": OddFolder("an adapter", REFUSED, "is an adapter, and no model", changes.as_adapter),
    "run": OddFolder("a run's folder", REFUSED, "has no config.json", changes.run, lambda path: path / "hf" / "last"),
    "cache": OddFolder(
        "the root of a copy in the hub's cache",
        REFUSED,
        "has no config.json",
        changes.cache,
        lambda path: path / "snapshots" / "abc123",
    ),
    "original": OddFolder("its maker's own form", REFUSED, "its maker's own form", changes.original),
    "pipeline": OddFolder("a pipeline of diffusers", REFUSED, "pipeline of diffusers", changes.pipeline),
    "absent": OddFolder("a folder that is not there", REFUSED, "no such folder", lambda folder: folder / "absent"),
}
"""The folders by name."""


def make_odd(name: str, root: Path) -> Path:
    """Makes an odd folder below a root; returns the path to give as the model."""
    plain = write_plain(root / name)
    return ODD[name].make(plain) or plain
