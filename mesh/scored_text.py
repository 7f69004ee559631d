"""A response as a reward model reads it: the same tokens where the model is trained and where it is served.

A reward model is asked with the text of a prompt and that of a response. So it is trained on these too, whatever the
chat template writes. Invariant: the last token is the one whose score counts. It is the end token, where there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rollmesh.mesh.masked_text import MaskedTokens, continuation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def scored_tokens(tokenizer: PreTrainedTokenizerBase, prompt: str, response: str) -> MaskedTokens:
    """Prompt, response and end token.

    A begin token that the tokenizer adds is there once, also where the prompt's template has written one.

    Args:
        tokenizer: of the reward model.
        prompt: as generators see it, special tokens included.
        response: see `response_text`.
    """
    tokens = continuation(tokenizer, prompt, response)
    begin = tokenizer.bos_token_id
    if begin is not None and tokens.ids[:2].tolist() == [begin, begin]:
        return MaskedTokens(tokens.ids[1:], tokens.trained[1:])
    return tokens


def response_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """A response as reward functions get it: the text of its tokens, special ones left out.

    Args:
        tokenizer: of the policy.
        ids: of the response.
    """
    return str(tokenizer.decode(list(ids), skip_special_tokens=True))
