"""Changes that make a plain model folder an odd one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from benchmarks.folders.plain import INDEX, SINGLE, SIZES, WEIGHT, edit, store, write_plain

Change = Callable[[Path], Path | None]
"""Changes a folder in place; gives the path to give as the model, where it is another."""
_EXPERTS = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_SIGHT = {
    "text_config": SIZES
    | {
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "vision_config": {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
    },
    "tie_word_embeddings": False,
}
_CODE = "from transformers import {0}ForCausalLM\nclass {1}({0}ForCausalLM):\n    pass\n"


def nothing(_folder: Path) -> None:
    """Leaves the folder as it is."""


def in_shards(folder: Path) -> None:
    sharded(folder)


def cast_all(dtype: torch.dtype) -> Change:
    return stored(lambda tensors: tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()}))


def with_copy(file: str) -> Change:
    """Another file of weights, which nothing names."""
    return lambda folder: save_file({"x": torch.ones(1)}, folder / file)


def pointer(folder: Path) -> None:
    (folder / SINGLE).write_text("version https://git-lfs.github.com/spec/v1\n", encoding="utf-8")


def infinite(folder: Path) -> None:
    cast(WEIGHT, torch.bfloat16)(folder)
    number(float("-inf"), WEIGHT)(folder)


def stored(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    return lambda folder: store(folder, change)


def configured(file: str = "config.json", **values: object) -> Callable[[Path], None]:
    return lambda folder: edit(folder, file, **values)


def added(*names: str) -> Callable[[Path], None]:
    return stored(lambda tensors: tensors.update({name: torch.ones(4) for name in names}))


def again(folder: Path, kind: str, **changes: object) -> None:
    """Writes the folder again, as another kind of model."""
    shutil.rmtree(folder)
    write_plain(folder, kind, **changes)


def sharded(folder: Path) -> list[Path]:
    """Stores the weights in two files and an index."""
    tensors = load_file(folder / SINGLE)
    names, half = sorted(tensors), len(tensors) // 2
    files = {"model-00001-of-00002.safetensors": names[:half], "model-00002-of-00002.safetensors": names[half:]}
    for file, own in files.items():
        save_file({name: tensors[name] for name in own}, folder / file, {"format": "pt"})
    where = {name: file for file, own in files.items() for name in own}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}), encoding="utf-8")
    (folder / SINGLE).unlink()
    return sorted(folder / file for file in files)


def stale_index(folder: Path) -> None:
    tensors = load_file(folder / SINGLE)
    sharded(folder)
    save_file({name: tensor + 0.5 for name, tensor in tensors.items()}, folder / SINGLE, {"format": "pt"})


def without_index(folder: Path) -> None:
    for path in (folder / INDEX, *folder.glob("model-*.safetensors")):
        path.unlink()


def cut(folder: Path, file: str, size: int) -> None:
    path = folder / file
    path.write_bytes(path.read_bytes()[:size])


def as_bin(folder: Path) -> None:
    torch.save(load_file(folder / SINGLE), folder / "pytorch_model.bin")


def only_bin(folder: Path) -> None:
    as_bin(folder)
    (folder / SINGLE).unlink()


def number(value: float, name: str = "model.norm.weight") -> Callable[[Path], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(-1)[3] = value

    return stored(change)


def tied(folder: Path, *, alike: bool) -> None:
    edit(folder, tie_word_embeddings=True)
    if alike:
        store(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))


def cast(name: str, dtype: torch.dtype) -> Callable[[Path], None]:
    return stored(lambda tensors: tensors.update({name: tensors[name].to(dtype)}))


def gptq(tensors: dict[str, Tensor]) -> None:
    for end in ("qweight", "qzeros", "g_idx"):
        tensors[WEIGHT.replace("weight", end)] = torch.zeros(4, 4, dtype=torch.int32)
    del tensors[WEIGHT]


def with_code(folder: Path, kind: str, own: str) -> None:
    (folder / "modeling_own.py").write_text(_CODE.format("Qwen3", own), encoding="utf-8")
    classes = {"AutoConfig": "modeling_own.Qwen3Config", "AutoModelForCausalLM": f"modeling_own.{own}"}
    edit(folder, model_type=kind, architectures=[own], auto_map=classes)


def builtin(folder: Path) -> None:
    edit(folder, drop=["auto_map"], architectures=["Qwen3ForCausalLM"])


def with_token(content: str, *, special: bool, pad: bool = False) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        tokenizer.add_tokens([AddedToken(content, special=special)], special_tokens=special)
        if pad:
            tokenizer.pad_token = content
        tokenizer.save_pretrained(folder)

    return make


def resized(folder: Path) -> None:
    """Gives the model a row for each token, as the hint of the error says."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(len(AutoTokenizer.from_pretrained(folder)))
    model.save_pretrained(folder)


def slow(folder: Path) -> None:
    """Leaves the tokenizer in the files of old: vocab.json and merges.txt, with a token beyond the embedding."""
    stored = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    known = {**stored["model"]["vocab"], **{token["content"]: token["id"] for token in stored["added_tokens"]}}
    (folder / "vocab.json").write_text(json.dumps(known), encoding="utf-8")
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in stored["model"]["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges), encoding="utf-8")
    (folder / "added_tokens.json").write_text(json.dumps({"<tool_call>": len(known)}), encoding="utf-8")
    (folder / "tokenizer.json").unlink()
    edit(folder, "tokenizer_config.json", drop=["added_tokens_decoder"], tokenizer_class="Qwen2Tokenizer")


def as_adapter(folder: Path) -> Path:
    out = folder.with_name(f"{folder.name}-adapter")
    out.mkdir()
    described = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": str(folder)}
    (out / "adapter_config.json").write_text(json.dumps(described), encoding="utf-8")
    save_file({"x": torch.ones(1)}, out / "adapter_model.safetensors")
    return out


def gguf(folder: Path) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(64))
    return path


def run(folder: Path) -> Path:
    run = folder.with_name(f"{folder.name}-run")
    (run / "hf").mkdir(parents=True)
    shutil.copytree(folder, run / "hf" / "last")
    (run / "services").mkdir()
    return run


def original(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "params.json").write_text("{}", encoding="utf-8")


def pipeline(folder: Path) -> None:
    (folder / "config.json").rename(folder / "model_index.json")


def cache(folder: Path) -> Path:
    root = folder.with_name(f"models--org--{folder.name}")
    shutil.copytree(folder, root / "snapshots" / "abc123")
    return root


def removed(*names: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return make


def first_shard(folder: Path) -> None:
    sharded(folder)[0].unlink()


def halved(folder: Path) -> None:
    last = sharded(folder)[1]
    cut(folder, last.name, last.stat().st_size - 100)


def index_lacks(folder: Path) -> None:
    sharded(folder)
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    del index["weight_map"][WEIGHT]
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")


def with_sight(folder: Path) -> None:
    again(folder, "qwen3_5", **_SIGHT)
    added("mtp.fc.weight", "mtp.norm.weight")(folder)


def next_layer(folder: Path) -> None:
    again(folder, "deepseek_v3", num_nextn_predict_layers=1, **_EXPERTS)
    added("model.layers.2.enorm.weight", "model.layers.2.eh_proj.weight")(folder)


def doubled(folder: Path) -> None:
    store(folder, lambda tensors: tensors.update({"norm.weight": tensors["model.norm.weight"].clone()}))


def other_class(folder: Path) -> None:
    """Qwen2Tokenizer splits digits and words by its own rules, whatever the file says."""
    again(folder, "qwen2")


def dropped(*names: str) -> Callable[[Path], None]:
    return stored(lambda tensors: [tensors.pop(name) for name in names])
