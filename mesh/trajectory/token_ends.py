"""The characters of a response's text up to the end of each of its tokens.

Invariants: ends never decrease and never exceed the length of the text. A character of several tokens ends with its
last; tokens without text end where the one before does.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import accumulate

from rollmesh.mesh.trajectory.text_division import characters_per_token


def token_ends(
    ids: Sequence[int],
    text: str,
    pieces: Callable[[Sequence[int]], Sequence[str]],
    decode: Callable[[Sequence[int]], str],
) -> list[int]:
    """For each token the number of characters (Unicode code points) of the text up to its end.

    Args:
        ids: all tokens of the text.
        text: what `decode` makes of them.
        pieces: a vocabulary's spelling of tokens; empty for tokens without text.
        decode: of the tokenizer; several times as slow as `pieces`, and used where these are not of bytes.
    """
    ends = _ends_of_bytes([_bytes_of(piece) for piece in pieces(ids)], text)
    return list(accumulate(characters_per_token(ids, text, decode))) if ends is None else ends


def placed_ends(ends: Sequence[int], text: str, *, tokens: int, begin: int, whole: bool) -> list[int]:
    """The ends of a text that stands at the end of a response, by all tokens of the response.

    Args:
        ends: by the tokens of the part, as `token_ends` finds them.
        tokens: of the whole response.
        begin: first token of the part.
        whole: the part decodes to this very text; otherwise its tokens are not known, and the last one has it all.
    """
    if not tokens:
        return []
    if not whole:
        return [0] * (tokens - 1) + [len(text)]
    return [0] * begin + list(ends)


@cache
def _alphabet() -> Mapping[str, int]:
    """The bytes of the characters by which byte-level vocabularies spell them (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


def _bytes_of(piece: str) -> bytes:
    try:
        return bytes(map(_alphabet().__getitem__, piece))
    except KeyError:  # a token that was added to the vocabulary as text
        return piece.encode()


def _ends_of_bytes(pieces: Sequence[bytes], text: str) -> list[int] | None:
    """The ends if the text is that of the bytes; None: its tokens are no bytes."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    parts: list[str] = []
    ends: list[int] = []
    end = 0
    for piece in pieces:
        part = decoder.decode(piece)
        parts.append(part)
        end += len(part)
        ends.append(end)
    if rest := decoder.decode(b"", final=True):
        parts.append(rest)
        ends[-1] += len(rest)
    return ends if "".join(parts) == text else None
