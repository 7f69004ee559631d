"""Divides a response's text among its tokens.

A token need not end where a character does: byte-level tokens hold parts of characters, and special tokens no text at
all. So tokens have counts of characters of the one text, instead of texts of their own. A character belongs to the
token that completes it.

Invariants: counts lead from the beginning of the text to at most its end. The cost is linear in the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

# The mark that a decoder leaves for bytes that are no character, or not yet.
_INCOMPLETE = "\ufffd"
# Tokens that are decoded before a token, as context: a decoder may treat the first token of a text otherwise.
_CONTEXT = 4
# Tokens without a complete character, after which the division continues as if there were one.
_LONGEST_PENDING = 16


def characters_per_token(ids: Sequence[int], text: str, decode: Callable[[Sequence[int]], str]) -> list[int]:
    """The number of characters of the text that each token completes.

    Args:
        ids: tokens of the response, from its first on; perhaps not to its last.
        text: what `decode` makes of all tokens of the response.
        decode: of a tokenizer.

    Returns:
        A count per token, in Unicode code points. Those of all tokens of a response add up to the length of the text.
        They add up to less for a tokenizer that changes the text of earlier tokens.
    """
    counts: list[int] = []
    # Tokens before `begun` are divided; they end at `end` of the text, and `before` is what their last ones decode to.
    begun, end, before = 0, 0, ""
    done = 0
    for index in range(len(ids)):
        decoded = decode(ids[max(0, begun - _CONTEXT) : index + 1])
        fresh = decoded[len(before) :] if decoded.startswith(before) else ""
        reached = max(done, end + _common_prefix(fresh, text, end))
        counts.append(reached - done)
        done = reached
        if not decoded.endswith(_INCOMPLETE) or index - begun >= _LONGEST_PENDING:
            begun, end = index + 1, done
            before = decode(ids[max(0, begun - _CONTEXT) : begun])
    return counts


def _common_prefix(fresh: str, text: str, start: int) -> int:
    """Characters of `fresh` that the text has from `start` on."""
    if text.startswith(fresh, start):
        return len(fresh)
    return next(
        (index for index, (a, b) in enumerate(zip(fresh, text[start : start + len(fresh)], strict=False)) if a != b),
        min(len(fresh), len(text) - start),
    )
