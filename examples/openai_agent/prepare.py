"""Makes the model and the data of the example: `python -m examples.openai_agent.prepare --out FOLDER`.

Sums of three digits and a tiny model that has seen, in a short warm start, how a calculator is called. An agent begins
its conversations as it likes; one token stands before all of them, as in the templates of most models.
"""

from __future__ import annotations

import random

from examples.calculator.prepare import conversation, row
from examples.chats import Example, calling_tokenizer, command_line
from examples.openai_agent.agent import TOOLS

_ROWS, _HELD_OUT, _WARM_ROWS = 2000, 128, 4000


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    command_line(__doc__, example, out="runs/openai-agent-data", warm_steps=300, arguments=arguments)


def example(rng: random.Random) -> Example:
    """Sums, and a calculator of the agent's own."""
    tokenizer = calling_tokenizer("calculate", "expression")
    tokenizer.chat_template = tokenizer.eos_token + tokenizer.chat_template
    rows = [row(rng) for _ in range(_ROWS + _HELD_OUT)]
    return Example(
        tokenizer,
        train=rows[_HELD_OUT:],
        held_out=rows[:_HELD_OUT],
        conversation=lambda: conversation(rng),
        conversations=_WARM_ROWS,
        tools=TOOLS,
    )


if __name__ == "__main__":
    main()
