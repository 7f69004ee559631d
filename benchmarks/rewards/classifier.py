"""Scores per second of a tiny sequence classifier: batches over all callers, against one call per item, in turns.

Both sides run the same model with one thread in a process of its own, and get the same texts. The one gets them as
groups from several callers at a time, the other one by one, as a plain reward function would ask. A third side is the
forward pass in this process, one text each: the cost of the model without any process around it.

    python -m benchmarks.rewards.classifier --json out.json
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import HelpFormatter, Summary, machine, summarize, table, write_json, yardstick
from rollmesh.mesh.config.scorers.classifier import ClassifierSection
from rollmesh.reward_service.classifier.classifier import Classifier
from rollmesh.reward_service.outcomes import RewardItem, Scored

_CONTEXT = 512


def write_model(folder: Path, hidden: int, layers: int) -> int:
    """Writes a classifier with random weights; returns the number of its parameters."""
    import torch
    from transformers import AutoModelForSequenceClassification, Qwen3Config

    from examples.demo.model import build_tokenizer

    tokenizer = build_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=_CONTEXT,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return int(sum(parameter.numel() for parameter in model.parameters()))


def groups_of(count: int, size: int) -> list[list[RewardItem]]:
    """Groups of responses with a long tail of lengths."""
    numbers = random.Random(0)
    groups = []
    for group in range(count):
        lengths = [min(400, 8 + int(numbers.paretovariate(1.2) * 16)) for _ in range(size)]
        groups.append(
            [
                RewardItem(f"{group}/{member}", str(group), "s", f"{group}+1=", numbers.choice("0123456789") * length)
                for member, length in enumerate(lengths)
            ]
        )
    return groups


async def batched(scorer: Classifier, groups: Sequence[Sequence[RewardItem]], callers: int) -> float:
    """Scores per second of groups from several callers at a time."""
    waiting = list(groups)

    async def call() -> None:
        while waiting:
            check(await asyncio.gather(*map(scorer, waiting.pop())))

    began = time.perf_counter()
    await asyncio.gather(*(call() for _ in range(callers)))
    return sum(map(len, groups)) / (time.perf_counter() - began)


async def one_by_one(scorer: Classifier, groups: Sequence[Sequence[RewardItem]]) -> float:
    """Scores per second of calls with one item."""
    began = time.perf_counter()
    for group in groups:
        for item in group:
            check([await scorer(item)])
    return sum(map(len, groups)) / (time.perf_counter() - began)


def plain(folder: Path, groups: Sequence[Sequence[RewardItem]]) -> float:
    """Scores per second of the plain model in this process, one text each."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.set_num_threads(1)
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    began = time.perf_counter()
    with torch.inference_mode():
        for group in groups:
            for item in group:
                ids = tokenizer(item.prompt + item.response, return_tensors="pt").input_ids
                float(model(input_ids=ids).logits.item())
    return sum(map(len, groups)) / (time.perf_counter() - began)


def check(outcomes: Sequence[Any]) -> None:
    """Ends the benchmark where an item has no score."""
    bad = [outcome for outcome in outcomes if not isinstance(outcome, Scored)]
    if bad:
        raise SystemExit(f"no score: {bad[0]}")


async def measure(folder: Path, options: argparse.Namespace) -> dict[str, Summary]:
    groups = groups_of(options.groups, options.size)
    # No wait: a lone caller has none to wait for.
    sections = {
        "batched": ClassifierSection(model=str(folder), device="cpu", template="text"),
        "one by one": ClassifierSection(model=str(folder), device="cpu", template="text", max_wait_ms=0),
    }
    scorers = {name: Classifier(name, section, call_timeout_s=600) for name, section in sections.items()}
    rates: dict[str, list[float]] = {name: [] for name in (*scorers, "plain")}
    try:
        for scorer in scorers.values():
            await scorer.rollmesh_service.start()
            await batched(scorer, groups[:2], 1)
        for _ in range(options.repeats):
            rates["batched"].append(await batched(scorers["batched"], groups, options.callers))
            rates["one by one"].append(await one_by_one(scorers["one by one"], groups))
            rates["plain"].append(await asyncio.to_thread(plain, folder, groups))
    finally:
        for scorer in scorers.values():
            await scorer.rollmesh_service.close()
    return {name: summarize(found) for name, found in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--groups", type=int, default=64, help="groups of responses")
    parser.add_argument("--size", type=int, default=8, help="responses in a group")
    parser.add_argument("--callers", type=int, default=16, help="groups that are asked about at a time")
    parser.add_argument("--hidden", type=int, default=64, help="width of the model")
    parser.add_argument("--layers", type=int, default=2, help="layers of the model")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each side, in turns")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    before = yardstick()
    with tempfile.TemporaryDirectory() as folder:
        parameters = write_model(Path(folder) / "model", options.hidden, options.layers)
        rates = asyncio.run(measure(Path(folder) / "model", options))
    ratio = rates["batched"].median / rates["one by one"].median
    print(table(("side", "scores/s"), [(name, rate) for name, rate in rates.items()]))
    print(f"{parameters / 1e6:.2f} M parameters; batched over one by one: {ratio:.2f}")
    if options.json:
        document = {
            "machine": machine(),
            "yardstick": [before, yardstick()],
            "options": {name: value for name, value in vars(options).items() if name != "json"},
            "parameters": parameters,
            "scores_per_s": rates,
            "ratio": ratio,
        }
        write_json(options.json, document)


if __name__ == "__main__":
    main()
