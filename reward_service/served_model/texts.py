"""Texts as a judging model reads them: token ids, and the places of the tokens whose values count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollmesh.mesh.errors import RewardError
from rollmesh.mesh.scored_text import scored_tokens
from rollmesh.reward_service.served_model.messages import ModelOptions, Text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Sequence:
    """Tokens of one pass.

    Attributes:
        ids: of all tokens.
        places: of those whose values are wanted; ascending.
    """

    ids: list[int]
    places: list[int]


class Reader:
    """Makes token ids of texts.

    Args:
        tokenizer: of the model.
        options: template, separator, system message.

    Raises:
        RewardError: a chat template is asked for, and the tokenizer has none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: ModelOptions) -> None:
        self._tokenizer: Any = tokenizer
        self._chat = options.template == "chat" or (not options.template and bool(tokenizer.chat_template))
        self._system = options.system
        self._steps = options.kind == "steps"
        if self._chat and not tokenizer.chat_template:
            raise RewardError(f"the tokenizer of {options.folder} has no chat template", hint="set `template: text`")
        self._separator = self._ids(options.separator) if self._steps else []
        if self._steps and not self._separator:
            raise RewardError("the separator of steps has no token", hint="set reward.process.separator")

    def read(self, text: Text) -> Sequence:
        """Tokens of a text.

        Raises:
            ValueError, TypeError: the chat template does not take its messages.
        """
        prompt, response, messages = text
        if not self._steps:
            ids = self._response(prompt, str(response), messages)
            return Sequence(ids, [len(ids) - 1])
        ids = self._prompt(prompt, messages)
        places = []
        # Piece by piece: a text that holds a separator moves no place.
        for step in response:
            ids += [*self._ids(step), *self._separator]
            places.append(len(ids) - 1)
        return Sequence(ids, places)

    def _response(self, prompt: str, response: str, messages: list[dict[str, Any]]) -> list[int]:
        if not self._chat:
            ids: list[int] = scored_tokens(self._tokenizer, prompt, response).ids.tolist()
            return ids
        whole = [*self._messages(prompt, messages), {"role": "assistant", "content": response}]
        return self._ids(self._tokenizer.apply_chat_template(whole, tokenize=False))

    def _prompt(self, prompt: str, messages: list[dict[str, Any]]) -> list[int]:
        if not self._chat:
            return list(self._tokenizer(prompt)["input_ids"])
        whole = self._messages(prompt, messages)
        return self._ids(self._tokenizer.apply_chat_template(whole, tokenize=False, add_generation_prompt=True))

    def _messages(self, prompt: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, *(messages or [{"role": "user", "content": prompt}])]

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []
