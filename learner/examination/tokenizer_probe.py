"""A folder's tokenizer as transformers opens it, compared with what the folder's files say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

FILE = "tokenizer.json"
"""The file that other programs read as it is: `tokenizers`, llama.cpp's converter."""
# Texts at which tokenizers part: spaces, digits, forms of letters, code, lines, marks.
_TEXTS = (
    "Hello world",
    " leading and trailing ",
    "two  spaces   three",
    "tab\tand\nline\r\nend",
    "12345 67 3.14159 1,000,000",
    "0x1F 2026-11-29 10:30:59",
    "don't can't I'LL we'Ve",
    "def f(x):\n    return x ** 2  # twice\n",
    '{"a": [1, 2, {"b": null}]}',
    "Caf\u00e9 Cafe\u0301 na\u00efve \u00c5ngstr\u00f6m A\u030angstr\u00f6m",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002",
    "\u3053\u3093\u306b\u3061\u306f \u4e16\u754c",
    "\ud55c\uad6d\uc5b4 \ubb38\uc7a5",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440!",
    "\u0645\u0631\u062d\u0628\u0627 \u0627\u0644\u0639\u0627\u0644\u0645",
    "\u0939\u093f\u0928\u094d\u0926\u0940",
    "\U0001f600\U0001f1eb\U0001f1f7\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\ufb01ne \u2460 \u00bd \u2126 \u212b",
    "a\u00a0b\u2003c\u200bd",
    "CamelCaseWord snake_case_word kebab-case",
    "<|im_start|>user\nhi<|im_end|>",
    "<s> </s> [INST] <unk> <pad>",
    "...!!!???---===***",
    "$x^2 + \\frac{1}{2}$",
)


def describe_other_reading(folder: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Says that transformers' class reads texts otherwise than the folder's `tokenizer.json`.

    Args:
        folder: of the model.
        tokenizer: as transformers has opened it.
    """
    path = folder / FILE
    if not path.is_file():
        return
    stored = Tokenizer.from_file(str(path))
    other = [text for text in _TEXTS if _ids(tokenizer, text) != stored.encode(text, add_special_tokens=False).ids]
    if other:
        yield (
            f"{type(tokenizer).__name__}, as which transformers opens {folder}, reads {len(other)} of {len(_TEXTS)} "
            f"texts otherwise than {FILE} there, {other[0]!r} among them. It is trained and sampled as the class "
            "reads, and so do engines; programs that go by the file alone, as llama.cpp, read otherwise"
        )


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
