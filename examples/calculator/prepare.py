"""Makes the model and the data of the example: `python -m examples.calculator.prepare --out FOLDER`.

The warm start shows two ways to answer. Mostly it gives up at once, and now and then it calls the calculator and
repeats the result. It is for reinforcement learning to find out which of them pays, and that numbers have to be copied
right.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from examples.chats import Example, Messages, calling_tokenizer, command_line
from rollmesh.mesh.agent_tools import load_tools

TOOL = f"{Path(__file__).with_name('tools.py')}:calculate"
_ROWS, _HELD_OUT, _WARM_ROWS = 2000, 128, 3000
# The share of the warm start's sums that are given up.
_GIVEN_UP, _DO_NOT_KNOW = 0.75, "?"


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    command_line(__doc__, example, out="runs/calculator-data", warm_steps=300, arguments=arguments)


def example(rng: random.Random) -> Example:
    """Sums, and a calculator."""
    rows = [row(rng) for _ in range(_ROWS + _HELD_OUT)]
    return Example(
        calling_tokenizer("calculate", "expression"),
        train=rows[_HELD_OUT:],
        held_out=rows[:_HELD_OUT],
        conversation=lambda: conversation(rng),
        conversations=_WARM_ROWS,
        tools=[tool.schema for tool in load_tools([TOOL])],
    )


def operands(rng: random.Random) -> tuple[int, int]:
    """Two numbers of three digits."""
    return rng.randint(100, 999), rng.randint(100, 999)


def row(rng: random.Random) -> dict[str, Any]:
    """A dataset row."""
    left, right = operands(rng)
    return {
        "data_source": "examples/calculator",
        "prompt": [{"role": "user", "content": f"{left}+{right}="}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(left + right)},
        "extra_info": {"split": "calculator"},
    }


def conversation(rng: random.Random) -> Messages:
    """A conversation of the warm start."""
    left, right = operands(rng)
    asked = {"role": "user", "content": f"{left}+{right}="}
    if rng.random() < _GIVEN_UP:
        return [asked, {"role": "assistant", "content": _DO_NOT_KNOW}]
    answer = {"role": "assistant", "content": str(left + right)}
    function = {"name": "calculate", "arguments": {"expression": f"{left}+{right}"}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    return [asked, call, {"role": "tool", "content": str(left + right)}, answer]


if __name__ == "__main__":
    main()
