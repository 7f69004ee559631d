"""Texts as a judging model reads them: token ids, and the places of the tokens whose values count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollmesh.mesh.chat.fitting import fit
from rollmesh.mesh.chat.probing import facts_of
from rollmesh.mesh.chat.template import ChatTemplate
from rollmesh.mesh.errors import ChatTemplateError, RewardError
from rollmesh.mesh.masked_text import encode_text
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
        RewardError: a chat template is asked for, and the tokenizer has none, or one that loses words.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: ModelOptions) -> None:
        self._tokenizer: Any = tokenizer
        chat = options.template == "chat" or (not options.template and bool(tokenizer.chat_template))
        self._system = options.system
        self._steps = options.kind == "steps"
        try:
            self._chat = ChatTemplate.of(tokenizer) if chat else None
            self._facts = facts_of(self._chat) if self._chat is not None else None
        except ChatTemplateError as error:
            raise RewardError(f"{options.folder}: {error.message}", hint="set `template: text`") from error
        self._separator = self._ids(options.separator) if self._steps else []
        if self._steps and not self._separator:
            raise RewardError("the separator of steps has no token", hint="set reward.process.separator")

    def read(self, text: Text) -> Sequence:
        """Tokens of a text.

        Raises:
            ChatTemplateError: the chat template does not take its messages.
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
        if self._chat is None:
            ids: list[int] = scored_tokens(self._tokenizer, prompt, response).ids.tolist()
            return ids
        whole = [*self._messages(prompt, messages), {"role": "assistant", "content": response}]
        return self._ids(self._render(whole, generation_prompt=False))

    def _prompt(self, prompt: str, messages: list[dict[str, Any]]) -> list[int]:
        if self._chat is None:
            return encode_text(self._tokenizer, prompt)
        return self._ids(self._render(self._messages(prompt, messages), generation_prompt=True))

    def _render(self, messages: list[dict[str, Any]], *, generation_prompt: bool) -> str:
        assert self._chat is not None, "only with a template"
        assert self._facts is not None, "asked with the template"
        return self._chat.render(fit(messages, self._facts), generation_prompt=generation_prompt)

    def _messages(self, prompt: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, *(messages or [{"role": "user", "content": prompt}])]

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []
