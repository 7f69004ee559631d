"""Stop strings that begin in tokens which a job was given and end in those that it samples.

An engine looks for stop strings in what it samples itself. So only the first few characters that a job adds to a
response need a second look. They are as many as the longest stop string has, less one; after these the engine sees all.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from rollmesh.generators.engines.stop_strings import StopMatcher

# Tokens looked back at, beyond one for each character that may belong to a stop string.
_MORE = 16


class BoundaryStopMatcher:
    """Watches the first tokens of one job.

    Args:
        matcher: has seen the tokens before them.
        reach: characters of the longest stop string, less one.
    """

    def __init__(self, matcher: StopMatcher, reach: int) -> None:
        self._matcher = matcher
        # The rest of a character that is incomplete at the boundary belongs to neither side.
        self._last = matcher.seen + reach + matcher.is_mid_character

    @property
    def is_past_boundary(self) -> bool:
        """True where further tokens cannot belong to a stop string that began before the job."""
        return self._matcher.seen >= self._last and not self._matcher.is_mid_character

    def first_match(self, tokens: Sequence[int]) -> int | None:
        """Adds tokens; index of the one that completes a stop string, None where none does."""
        for index, token in enumerate(tokens):
            if self._matcher.push((token,)):
                return index
            if self.is_past_boundary:
                return None
        return None


def boundary_matcher(
    tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], before: list[int]
) -> BoundaryStopMatcher | None:
    """Watches for stop strings that begin in `before`.

    Args:
        tokenizer: of the model.
        stop: strings, at least one, that do not occur in `before`.
        before: all sampled tokens in which they may begin.

    Returns:
        None where none can have begun there.
    """
    reach = max(len(text) for text in stop) - 1
    count = reach + _MORE
    while count < len(before) and len(tokenizer.decode(before[-count:], skip_special_tokens=True)) < reach + 1:
        count *= 2
    matcher = StopMatcher(tokenizer, stop)
    if before:
        matcher.push(before[-count:])
    boundary = BoundaryStopMatcher(matcher, reach)
    return None if boundary.is_past_boundary or not before else boundary
