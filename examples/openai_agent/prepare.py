"""Makes what the example trains: `python -m examples.openai_agent.prepare --out FOLDER`.

Sums of three digits and a tiny model that has seen, in a short warm start, how a calculator is called. An agent begins
its conversations as it likes; one token stands before all of them, as in the templates of most models.
"""

from __future__ import annotations

import argparse
import json
import random
import string
from pathlib import Path

from examples.calculator.prepare import conversation, row
from examples.chats import chat_tokenizer, pair_of, prepare
from examples.openai_agent.agent import TOOLS

_PIECES = ("calculate", '{"name": "calculate", "arguments": {"expression": "', '"}}')
_ROWS, _HELD_OUT, _WARM_ROWS = 2000, 128, 4000
# Of the warm start: no more are made than it sees.
_PER_STEP = 64


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/openai-agent-data"), help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warm-steps", type=int, default=300, help="supervised steps before reinforcement learning")
    options = parser.parse_args(arguments)
    rng = random.Random(options.seed)
    tokenizer = chat_tokenizer(string.digits + string.ascii_letters + " +-*=.,:'()\"{}?", _PIECES)
    tokenizer.chat_template = tokenizer.eos_token + tokenizer.chat_template
    rows = [row(rng) for _ in range(_ROWS + _HELD_OUT)]
    warm_rows = min(_WARM_ROWS, _PER_STEP * options.warm_steps)
    made = prepare(
        options.out,
        tokenizer,
        train=rows[_HELD_OUT:],
        held_out=rows[:_HELD_OUT],
        warm=[pair_of(tokenizer, conversation(rng), TOOLS) for _ in range(warm_rows)],
        warm_steps=options.warm_steps,
        seed=options.seed,
    )
    print(f"prepared {options.out}: {json.dumps(made)}")


if __name__ == "__main__":
    main()
