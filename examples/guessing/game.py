"""The environment: a class with `reset` and `step`; every turn of the model is an action."""

HIGHEST = 6


class Guessing:
    """A number from 0 to `HIGHEST` is to be found within `guesses` guesses; halving always finds it within three.

    The reward is 1 where it is found, else 0.
    """

    def reset(self, number: int, guesses: int = 3) -> str:
        """Begins a game; the arguments come from the row's `extra_info`.

        Returns:
            The continuation of the prompt.
        """
        self._number, self._left = number, guesses
        return f"0-{HIGHEST}"

    def step(self, action: str) -> tuple[str, float, bool]:
        """Takes a guess.

        Returns:
            The answer to the model, the reward of this step, and True once the game is over.
        """
        self._left -= 1
        if not action.isdigit() or len(action) > 3:
            return "a number", 0.0, self._left == 0
        guess = int(action)
        if guess == self._number:
            return "found", 1.0, True
        return "higher" if guess < self._number else "lower", 0.0, self._left == 0
