"""A plugin of SGLang: its schedulers follow grammars, although the server has no tokenizer.

SGLang itself has grammars only where it also turns all tokens into text, and takes more tokens for ends than the model
declares. Its processes would read the tokenizer's files several times each. Here the tokenizer is read with the first
grammar, and used for grammars alone.

It runs in the server's processes, which know nothing of Rollmesh. `server_plugins` puts it there, with its files.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLTokenizer

# The tokenizer of the `tokenizers` package; number of the model's logits, and tokens that end a response.
TOKENIZER, FACTS = "tokenizer.json", "facts.json"
_MADE = "sglang.srt.constrained.grammar_manager.GrammarManager.__init__"


def install() -> None:
    """Called by SGLang in each of a server's processes, before schedulers are made."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_MADE, _equip, HookType.AFTER)


def _equip(_: None, manager: Any, *__: object) -> None:
    manager.grammar_backend = _grammar_backend(Path(__file__).parent)


def _grammar_backend(folder: Path) -> Any:
    """The grammars of one scheduler.

    Args:
        folder: has the files.
    """
    from sglang.srt.constrained.base_grammar_backend import BaseGrammarBackend
    from sglang.srt.constrained.llguidance_backend import GuidanceGrammar

    class Grammars(BaseGrammarBackend):
        @cached_property
        def _tokenizer(self) -> LLTokenizer:
            from llguidance import LLTokenizer

            facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
            text = (folder / TOKENIZER).read_text(encoding="utf-8")
            return LLTokenizer(text, n_vocab=facts["vocabulary"], eos_token=facts["ends"])

        def dispatch_ebnf(self, key_string: str) -> Any:
            """As SGLang calls it, in a thread; what is raised refuses the request."""
            return GuidanceGrammar(self._tokenizer, key_string)

    return Grammars()
