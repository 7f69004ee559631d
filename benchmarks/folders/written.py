"""Folders that trainings leave, as transformers, peft and vLLM read them: the table of docs/written-folders.md.

    python -m benchmarks.folders.written docs/written-folders.md --vllm .venv-vllm/bin/python

Every model is tiny and random: the kinds of the planner's fixtures, and one with a vision tower and layers that predict
further tokens. Each is trained for one step by `sft`, by `dpo` with frozen embeddings, by `sft` with an adapter, and by
a run. A folder is compared with the checkpoint of that step, and with the model from which it came. Two minutes on a
CPU without vLLM.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from benchmarks.common import REPOSITORY, HelpFormatter
from rollmesh.learner.algorithms.docs_reference import fill, markdown_table
from rollmesh.learner.checkpoint.hf_folders import checkpoint_weights
from rollmesh.learner.checkpoint.names import list_checkpoints
from rollmesh.learner.control_requests import ControlRequests
from rollmesh.learner.model_files.stored_model import StoredModel
from rollmesh.learner.trainers.process import train_rank
from rollmesh.mesh.config.lora import LoraSection
from rollmesh.mesh.errors import DataError
from rollmesh.trainers import read_trainer_config

NAME = "written"
FIXTURES = REPOSITORY / "tests/rollmesh/planning/architectures"
COMMANDS = ("sft", "dpo", "lora", "run")
TOLERANCE = 1e-5
"""Largest difference of logits in float32."""
_END, _TEXT_END = "<|eot|>", "<|end_of_text|>"
_SPECIAL = ("<|pad|>", _TEXT_END, "<|start|>", "<|head|>", _END, "<image>", "<video>", "<v_s>", "<v_e>")
_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}<|head|>{{ m.content }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|head|>{% endif %}"
)
_REWARD = """def score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(map(ord, solution_str)) % 7
"""
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "max_window_layers": 2,
}
TEXTS = (
    "1234567890",
    "3.14 and 2,718",
    "  two  spaces",
    "\ttab\tand\n\n\nlines",
    "caf\u00e9",
    "cafe\u0301",
    "\ufb01 \u216b \u00bd",
    "\u4f60\u597d\u4e16\u754c",
    "\u3053\u3093\u306b\u3061\u306f",
    "\u0645\u0631\u062d\u0628\u0627",
    "\u0928\u092e\u0938\u094d\u0924\u0947",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467",
    "def f(x):\n    return x**2",
    "don't I'LL we've",
    "<|eot|>inside",
    " <|eot|> around ",
    "<|end_of_text|>",
    "<|eo t|>",
    "a\u00a0b\u2009c",
    "\u2026--\u2014",
    "https://a.b/c?d=e&f",
    "{'json': [1, 2.5, null]}",
    "\u0000\u0007\u001b",
    "",
)


@dataclass(frozen=True, slots=True)
class Case:
    """A model of the table.

    Attributes:
        name: of its folder.
        like: the fixtures of which it is a small form.
        config: of it.
    """

    name: str
    like: str
    config: Any


@dataclass(frozen=True, slots=True)
class Findings:
    """The comparison of one folder.

    Attributes:
        logits: largest difference between plain transformers on the folder, and on the checkpoint's tensors.
        peft: the same for the adapter's folder on the base; None without one.
        ids: texts that the folder's tokenizer reads otherwise.
        untouched, changed: tensors that were not trained, and those among them with other bits.
        moved: tensors that training changed.
        stops: `generate()` stops at the trained end.
        vllm: largest difference of vLLM's log-probs, and whether it stops; empty where it was not asked.
    """

    logits: float
    peft: float | None
    ids: int
    untouched: int
    changed: int
    moved: int
    stops: bool
    vllm: str = ""

    @property
    def is_right(self) -> bool:
        """Whether the folder is what was trained."""
        most = max(self.logits, self.peft or 0.0)
        return most <= TOLERANCE and not self.ids and not self.changed and self.moved > 0 and self.stops


def cases() -> list[Case]:
    """A small form of each fixture, equal ones once, and a model of several parts."""
    like: dict[str, list[str]] = {}
    for path in sorted(FIXTURES.iterdir()):
        values = json.loads((path / "config.json").read_text(encoding="utf-8"))
        values |= {key: value for key, value in _TINY.items() if key in values}
        values.pop("vocab_size", None)
        like.setdefault(json.dumps(values, sort_keys=True), []).append(path.name)
    found = []
    for text, names in like.items():
        values = json.loads(text)
        kind = values.pop("model_type")
        found.append(Case(names[0], ", ".join(names), AutoConfig.for_model(kind, **values)))
    linear = {f"linear_{name}": 2 for name in ("num_key_heads", "num_value_heads")}
    linear |= {f"linear_{name}": 16 for name in ("key_head_dim", "value_head_dim")}
    small = {key: value for key, value in _TINY.items() if "expert" not in key and "window" not in key}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 4}
    composite = AutoConfig.for_model(
        "qwen3_5",
        text_config={**small, **linear, "layer_types": ["linear_attention", "full_attention"]},
        vision_config={**vision, "out_hidden_size": 64, "num_position_embeddings": 16},
        tie_word_embeddings=False,
    )
    return [*found, Case("qwen3.5", "Qwen3.5 with a vision tower and `mtp` layers", composite)]


def write_source(folder: Path, case: Case) -> Path:
    """Writes the model of a case; its files name another end than its template."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=[*_SPECIAL], initial_alphabet=alphabet)
    raw.train_from_iterator(["the cat sat on the mat, 12 and 345 don't"] * 20, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=_TEXT_END, pad_token=_SPECIAL[0])
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    # Until everything is read alike, as AutoTokenizer may choose a class of its own.
    text = case.config.get_text_config()
    text.vocab_size = len(tokenizer)
    end = tokenizer.convert_tokens_to_ids(_TEXT_END)
    text.eos_token_id, text.bos_token_id, text.pad_token_id = end, None, tokenizer.pad_token_id
    is_composite = text is not case.config
    for name, token in (("image", "<image>"), ("video", "<video>"), ("vision_start", "<v_s>"), ("vision_end", "<v_e>")):
        if is_composite:
            setattr(case.config, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        factory: Any = AutoModelForImageTextToText if is_composite else AutoModelForCausalLM
        model = factory.from_config(case.config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(4.0)
        model.generation_config = GenerationConfig(eos_token_id=end, temperature=0.7, do_sample=True)
        model.save_pretrained(folder)
        if is_composite:
            more = {"mtp.fc.weight": torch.randn(64, 128), "mtp.norm.weight": torch.randn(64)}
            path = folder / "model.safetensors"
            save_file(load_file(path) | more, path, {"format": "pt"})
    return folder


def train(command: str, source: Path, folder: Path, run: Path) -> LoraSection | None:
    """Trains one step; gives the adapter's description.

    Args:
        command: `sft`, `dpo`, `lora` or `run`.
        source: the model.
        folder: of data.
        run: folder of the run.
    """
    rows: dict[str, Any] = {"learner.steps": 1, "learner.optimizer.lr": 1e-2, "model.dtype": "float32"}
    rows |= {"run.name": run.name, "run.dir": run.parent, "model.path": source, "checkpoint.hf": "[last]"}
    if command == "run":
        _run(rows | {"data.train": folder / "prompts.jsonl"}, folder)
        return None
    rows |= {"learner.batch.rows": 4, "data.train": folder / ("dpo.jsonl" if command == "dpo" else "sft.jsonl")}
    if command == "dpo":
        rows["learner.frozen"] = "[embed_tokens]"
    if command == "lora":
        rows["learner.lora"] = "{rank: 4}"
    overrides = [f"{name}={value}" for name, value in rows.items()]
    config = read_trainer_config("dpo" if command == "dpo" else "sft", {}, overrides)
    train_rank("dpo" if command == "dpo" else "sft", config, ControlRequests())
    return config.learner.lora


def _run(values: Mapping[str, Any], folder: Path) -> None:
    values = dict(values) | {
        "algorithm.name": "grpo",
        "rollout.engine": "hf",
        "rollout.n": 2,
        "rollout.max_prompt_tokens": 64,
        "rollout.max_response_tokens": 8,
        "reward.functions": f"['{folder / 'reward.py'}:score']",
        "reward.in_process": "true",
        "learner.batch.groups": 2,
        "buffer.max_staleness": 0,
    }
    (folder / "run.yaml").write_text("{}\n", encoding="utf-8")
    overrides = [f"--{name}={value}" for name, value in values.items()]
    command = [sys.executable, "-m", "rollmesh", "run", str(folder / "run.yaml"), *overrides]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY)
    if done.returncode == DataError.exit_code:
        raise DataError("refused")
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout[-2000:]} {done.stderr[-2000:]}")


def write_data(folder: Path) -> None:
    """Writes rows for each command, and a reward."""
    asked = [("hello", "the cat sat"), ("two", "12 and 345"), ("mat", "on the mat"), ("what", "don't")]
    user = [[{"role": "user", "content": question}] for question, _ in asked]
    said = [[{"role": "assistant", "content": answer}] for _, answer in asked]
    files: dict[str, list[dict[str, Any]]] = {
        "sft": [{"messages": prompt + answer} for prompt, answer in zip(user, said, strict=True)],
        "dpo": [
            {"prompt": prompt, "chosen": good, "rejected": bad}
            for prompt, good, bad in zip(user, said, said[1:] + said[:1], strict=True)
        ],
        "prompts": [
            {"prompt": prompt, "data_source": "d", "reward_model": {"style": "rule", "ground_truth": "x"}}
            for prompt in user
        ],
    }
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "reward.py").write_text(_REWARD, encoding="utf-8")


def compare(source: Path, run: Path, lora: LoraSection | None, command: str) -> Findings:
    """Compares the folder that a training has left."""
    out = run / "hf" / "last"
    tokenizer = AutoTokenizer.from_pretrained(out)
    own = AutoTokenizer.from_pretrained(source)
    ids = torch.tensor([_conversation(tokenizer)])
    trained = _trained_logits(source, list_checkpoints(run / "checkpoints")[-1][1], lora, ids)
    model = _load(out)
    with torch.no_grad():
        logits = model(ids).logits
    end = tokenizer.convert_tokens_to_ids(_END)
    answered = model.generate(ids, max_new_tokens=4, do_sample=False, prefix_allowed_tokens_fn=lambda *_: [end])
    before, after = _tensors(source), _tensors(out)
    touched = _touched(run, command, before)
    untouched = [name for name in before if name not in touched]
    changed = [name for name in untouched if name not in after or not _same_bits(before[name], after[name])]
    moved = [name for name in touched if name in after and not torch.equal(before[name], after[name])]
    return Findings(
        float((logits - trained).abs().max()),
        None if lora is None else _peft_difference(source, run / "hf" / "last-adapter", ids, trained),
        sum(own.encode(text) != tokenizer.encode(text) for text in TEXTS) + abs(len(TEXTS) - 24),
        len(untouched),
        len(changed),
        len(moved),
        answered.shape[1] == ids.shape[1] + 1 and set(before) == set(after),
    )


def _conversation(tokenizer: Any) -> list[int]:
    asked = [{"role": "user", "content": "two and 345?"}]
    ids: list[int] = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    return ids


def _load(folder: Path) -> Any:
    is_composite = AutoConfig.from_pretrained(folder).model_type == "qwen3_5"
    factory: Any = AutoModelForImageTextToText if is_composite else AutoModelForCausalLM
    return factory.from_pretrained(folder).eval()


def _trained_logits(source: Path, checkpoint: Path, lora: LoraSection | None, ids: Tensor) -> Tensor:
    """The logits of the checkpoint's tensors in the class of transformers."""
    model = AutoModelForCausalLM.from_pretrained(source).eval()
    with StoredModel(source) as stored:
        values = dict(checkpoint_weights(checkpoint, stored, torch.float32, lora))
    model.load_state_dict(values, strict=False)
    with torch.no_grad():
        logits: Tensor = model(ids).logits
    return logits


def _peft_difference(source: Path, adapter: Path, ids: Tensor, trained: Tensor) -> float:
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(source), str(adapter)).eval()
    with torch.no_grad():
        return float((model(ids).logits - trained).abs().max())


def _tensors(folder: Path) -> dict[str, Tensor]:
    return {name: one for path in sorted(folder.glob("*.safetensors")) for name, one in load_file(path).items()}


def _same_bits(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def _touched(run: Path, command: str, names: Mapping[str, Tensor]) -> set[str]:
    """Stored names of the tensors that a command trains."""
    trained = {name for name in names if not name.startswith(("mtp.", "model.visual."))}
    if command == "dpo":
        return {name for name in trained if "embed_tokens" not in name}
    if command != "lora":
        return trained
    layers = json.loads((run / "hf/last-adapter/adapter_config.json").read_text(encoding="utf-8"))["target_modules"]
    plain = {name: name.replace("model.language_model.", "model.") for name in trained}
    return {name for name in trained if plain[name].removesuffix(".weight") in layers}


def ask_vllm(python: Path, folders: Sequence[Path]) -> dict[str, str]:
    """The findings of vLLM about folders, each in words."""
    script = Path(__file__).with_name("in_vllm.py")
    asked = [str(folder) for folder in folders]
    done = subprocess.run([str(python), str(script), *asked], capture_output=True, text=True, check=False)
    found = dict.fromkeys(asked, "not loaded")
    for said in (json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"folder"')):
        ids = torch.tensor([said["ids"]])
        with torch.no_grad():
            probs = _load(Path(said["folder"]))(ids).logits.float().log_softmax(-1)
        own = [float(probs[0, place, token]) for place, token in enumerate(said["ids"][1:])]
        worst = max(abs(left - right) for left, right in zip(own, said["log_probs"], strict=True))
        found[said["folder"]] = f"{worst:.0e}, {'stops' if said['stops'] else 'does not stop'}"
    return found


def table(vllm: Path | None, scratch: Path) -> str:
    """The table, as Markdown; what is wrong goes to stderr."""
    write_data(scratch)
    rows = []
    for case in cases():
        source = write_source(scratch / "models" / case.name, case)
        found: dict[str, Findings] = {}
        refused: list[str] = []
        for command in COMMANDS:
            run = scratch / "runs" / f"{case.name}-{command}"
            try:
                lora = train(command, source, scratch, run)
            except DataError:
                refused.append(command)
                continue
            found[command] = compare(source, run, lora, command)
            print(case.name, command, found[command], file=sys.stderr, flush=True)
        folders = [scratch / "runs" / f"{case.name}-{command}" / "hf" / "last" for command in found]
        asked = ask_vllm(vllm, folders) if vllm is not None else {}
        said = sorted({*asked.values()})
        cells = ["refused: engine hf does not serve it" if one in refused else _cell(found[one]) for one in COMMANDS]
        rows.append((case.like, *cells, "; ".join(said) if said else "not asked"))
        for folder in (source, *(folder.parent.parent for folder in folders)):
            shutil.rmtree(folder)
    return markdown_table(("small forms of", "sft", "dpo, frozen embeddings", "sft with LoRA", "run", "vLLM"), rows)


def _cell(found: Findings) -> str:
    words = [f"{found.logits:.0e}"]
    if found.peft is not None:
        words.append(f"peft {found.peft:.0e}")
    words.append(f"{found.untouched} kept" if not found.changed else f"{found.changed} of {found.untouched} CHANGED")
    return ", ".join(words) if found.is_right else f"WRONG: {', '.join(words)}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the table into its page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("page", type=Path, help="page with the markers of the table")
    parser.add_argument("--vllm", type=Path, help="Python of an environment with vLLM; without it vLLM is not asked")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        text = table(given.vllm, Path(scratch))
    given.page.write_text(fill(given.page.read_text(encoding="utf-8"), {NAME: text}), encoding="utf-8")


if __name__ == "__main__":
    main()
