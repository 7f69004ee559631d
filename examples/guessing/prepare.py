"""Makes the model and the data of the example: `python -m examples.guessing.prepare --out FOLDER`.

The warm start shows the course of games, most of them badly played: by guesses that ignore the answers before them.
Good guesses are for reinforcement learning to find.
"""

from __future__ import annotations

import random
import string
from typing import Any

from examples.chats import Example, Messages, chat_tokenizer, command_line
from examples.guessing.game import HIGHEST, Guessing

_PIECES = ("higher", "lower", "found", "a number")
_ROWS, _HELD_OUT, _WARM_GAMES = 1500, 120, 3000
_HEEDFUL = 0.1


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    command_line(__doc__, example, out="runs/guessing-data", warm_steps=80, arguments=arguments)


def example(rng: random.Random) -> Example:
    """Games."""
    return Example(
        chat_tokenizer(string.digits + "- ", _PIECES),
        train=[row(rng.randint(0, HIGHEST)) for _ in range(_ROWS)],
        # Every number as often as any other.
        held_out=[row(index % (HIGHEST + 1)) for index in range(_HELD_OUT)],
        conversation=lambda: example_game(rng),
        conversations=_WARM_GAMES,
    )


def row(number: int) -> dict[str, Any]:
    """A dataset row; the environment's first observation continues its message."""
    return {
        "data_source": "examples/guessing",
        "prompt": [{"role": "user", "content": ""}],
        "ability": "game",
        "reward_model": {"style": "environment", "ground_truth": str(number)},
        "extra_info": {"number": number},
    }


def example_game(rng: random.Random) -> Messages:
    """A game as the warm start shows it."""
    game = Guessing()
    messages: list[dict[str, Any]] = [{"role": "user", "content": game.reset(rng.randint(0, HIGHEST))}]
    lowest, highest, heedful = 0, HIGHEST, rng.random() < _HEEDFUL
    while True:
        guess = rng.randint(lowest, highest) if heedful else rng.randint(0, HIGHEST)
        messages.append({"role": "assistant", "content": str(guess)})
        answer, _, over = game.step(str(guess))
        if over:
            return messages
        lowest, highest = (max(lowest, guess + 1), highest) if answer == "higher" else (lowest, min(highest, guess - 1))
        messages.append({"role": "user", "content": answer})


if __name__ == "__main__":
    main()
