"""Tiny models that chat: the shared part of the examples with several turns."""

from __future__ import annotations

import argparse
import json
import random
import string
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import PreTrainedTokenizerFast

from examples.demo.model import build_tokenizer, write_model
from rollmesh.learner.trainers.warm_start import Pair, warm_start

Messages = Sequence[Mapping[str, Any]]
_WARM_LR = 2e-3
_WARM_BATCH = 64
_ROLES = ["<tools>", "<user>", "<assistant>", "<tool>", "<tool_call>", "</tool_call>"]
# Names of tools, then each message after its role; calls are in the format of `rollout.agent.parser: hermes`.
_TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool.function.name }}{% endfor %}<end>{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def chat_tokenizer(characters: str, pieces: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """A tokenizer of characters and pieces, with tokens for roles and tool calls."""
    return build_tokenizer(characters, pieces=[*_ROLES, *pieces], chat_template=_TEMPLATE)


def calling_tokenizer(tool: str, argument: str) -> PreTrainedTokenizerFast:
    """A tokenizer of letters, digits and sums, in which all of a call of one tool but its argument is three tokens."""
    call = f'{{"name": "{tool}", "arguments": {{"{argument}": "'
    return chat_tokenizer(string.digits + string.ascii_letters + " +-*=.,:'()\"{}?", (tool, call, '"}}'))


def pair_of(tokenizer: PreTrainedTokenizerFast, messages: Messages, tools: Sequence[Mapping[str, Any]] = ()) -> Pair:
    """A conversation to learn from: the prompt up to the model's first turn, the tokens after it, and a mask of the
    model's own."""
    text = tokenizer.apply_chat_template(
        [dict(message) for message in messages], tools=[dict(tool) for tool in tools] or None, tokenize=False
    )
    ids = tokenizer.encode(text, add_special_tokens=False)
    starts, end = tokenizer.convert_tokens_to_ids("<assistant>"), tokenizer.eos_token_id
    first = ids.index(starts) + 1
    response, mask, speaks = ids[first:], [], True
    for token in response:
        mask.append(int(speaks))
        speaks = token == starts or (speaks and token != end)
    return ids[:first], response, mask


@dataclass(frozen=True, slots=True)
class Example:
    """Data and model of an example.

    Attributes:
        tokenizer: of the model.
        train, held_out: rows with verl's fields.
        conversation: makes one of those that the model sees before reinforcement learning.
        conversations: most of them that are made.
        tools: schemas, as the conversations show them.
    """

    tokenizer: PreTrainedTokenizerFast
    train: Sequence[Mapping[str, Any]]
    held_out: Sequence[Mapping[str, Any]]
    conversation: Callable[[], Messages]
    conversations: int
    tools: Sequence[Mapping[str, Any]] = ()


def command_line(
    description: str,
    make: Callable[[random.Random], Example],
    *,
    out: str,
    warm_steps: int,
    arguments: list[str] | None,
) -> None:
    """The command line of an example's `prepare`.

    Args:
        description: for `--help`.
        make: the example, by the draws of a seed.
        out, warm_steps: defaults of `--out` and `--warm-steps`.
        arguments: None: those of the process.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(out), help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--warm-steps", type=int, default=warm_steps, help="supervised steps before reinforcement learning"
    )
    options = parser.parse_args(arguments)
    example = make(random.Random(options.seed))
    made = prepare(options.out, example, warm_steps=options.warm_steps, seed=options.seed)
    print(f"prepared {options.out}: {json.dumps(made)}")


def prepare(out: Path, example: Example, *, warm_steps: int, seed: int) -> dict[str, Any]:
    """Writes `model/` (after a short supervised warm start), `train.parquet`, `eval.parquet` and `prepared.json`.

    Args:
        out: folder to write.
        example: to be trained.
        warm_steps: of the warm start.
        seed: of the model and of the order.
    """
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", example.train), ("eval", example.held_out)):
        pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), out / f"{name}.parquet")
    # No more than the warm start sees.
    count = min(example.conversations, _WARM_BATCH * warm_steps)
    warm = [pair_of(example.tokenizer, example.conversation(), example.tools) for _ in range(count)]
    with tempfile.TemporaryDirectory() as scratch:
        parameters = write_model(Path(scratch), seed, example.tokenizer)
        losses = warm_start(
            scratch, warm, steps=warm_steps, lr=_WARM_LR, batch=_WARM_BATCH, out_folder=out / "model", seed=seed
        )
    made = {
        "seed": seed,
        "parameters": parameters,
        "train_rows": len(example.train),
        "eval_rows": len(example.held_out),
        "warm_steps": warm_steps,
        "warm_loss": round(losses[-1], 3),
    }
    (out / "prepared.json").write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
    return made
