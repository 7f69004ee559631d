"""Facts about published chat templates, and whether conversations of each are trained as they are meant.

    python -m benchmarks.templates.survey FOLDER [FOLDER ...] --json survey.json --page docs/chat-templates.md

Folders hold templates as `.jinja` files, as the wheels of TRL and vLLM have them. No model is downloaded: a tokenizer
of bytes has every mark that a template writes as a special token. A template trains if the decoded tokens that count
are the answer and the token that ends it, in supervised training and in preference pairs. A prompt has all its words.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.common import HelpFormatter, machine, table, write_json
from rollmesh.generators.agents.tool_call_parsers import PARSERS, choose_parser
from rollmesh.learner.data.chat_turns import ChatEncoder
from rollmesh.learner.data.prompts import PromptEncoder
from rollmesh.learner.data.rows import Row
from rollmesh.mesh.chat.facts import TemplateFacts
from rollmesh.mesh.chat.probing import facts_of
from rollmesh.mesh.chat.template import ChatTemplate
from rollmesh.mesh.chat.thoughts import thoughts_end
from rollmesh.mesh.errors import ConfigError, RollmeshError

_MARK = re.compile(
    r"<[|\uff5c][^<>{}'\"\s]*[|\uff5c]?>|<[^<>{}'\"\s]*[|\uff5c]>|</?s>|<(?:start|end)_of_\w+>|\[/?INST\]"
)
_BEGIN, _END = "<!-- table of templates -->", "<!-- end of the table -->"
_USER, _ANSWER = "Which is larger?", "The second one."
HEADER = ("template", "contents", "a turn ends with", "thoughts", "calls", "sft", "dpo", "run")


@dataclass(frozen=True, slots=True)
class Surveyed:
    """One template.

    Attributes:
        name: of its file.
        facts: None: it writes no conversation.
        parser: that reads the calls that it writes; empty: none does.
        sft, dpo, run: "trains", or why not; one that writes no conversation says why once.
    """

    name: str
    facts: TemplateFacts | None
    parser: str
    sft: str
    dpo: str
    run: str


def tokenizer_of(source: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes with the marks of a template."""
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=letters, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([*sorted(set(_MARK.findall(source))), "<end>", "<begin>"])
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", bos_token="<begin>")
    made.chat_template = source
    return made


def survey(name: str, source: str) -> Surveyed:
    """Asks a template, and encodes conversations with it."""
    tokenizer = tokenizer_of(source)
    try:
        facts = facts_of(ChatTemplate.of(tokenizer))
    except RollmeshError as error:
        return Surveyed(name, None, "", f"refused: {error.message}", "refused", "refused")
    answer = {"role": "assistant", "content": _ANSWER}
    if facts.opened_thoughts:
        closing = thoughts_end(facts.opened_thoughts)
        answer["content"] = f"{facts.opened_thoughts}\nLook.\n{closing}\n\n{_ANSWER}"
    question = {"role": "user", "content": _USER}
    encoder = ChatEncoder(tokenizer)

    def ends(answered: str) -> bool:
        """Whether a turn has the answer, and one of the ends right after it."""
        after = answered.rpartition(_ANSWER)[2].strip()
        return _ANSWER in answered and after in (facts.end.tokens or (tokenizer.eos_token,))

    def sft() -> bool:
        tokens = encoder.encode([question, answer], [1])
        return ends(tokenizer.decode(tokens.ids[tokens.trained]))

    def sft_all() -> bool:
        tokens = encoder.encode([question, answer, question, answer], [1, 3])
        return ends(tokenizer.decode(tokens.ids[tokens.trained]))

    def run() -> bool:
        prompts = PromptEncoder(tokenizer, max_prompt_tokens=999, template_kwargs={})
        text = tokenizer.decode(prompts.ids(Row([question], "", None, {})))
        return text.count(_USER) == 1

    single, every = _tried(sft), _tried(sft_all)
    of_turns = "trains" if every == single == "trains" else f"the last turn: {single}" if single != every else single
    return Surveyed(name, facts, _parser(tokenizer.chat_template, facts), of_turns, single, _tried(run))


def _parser(source: str, facts: TemplateFacts) -> str:
    try:
        chosen = choose_parser("auto", source, facts)
    except ConfigError:
        return "no parser"
    return next(name for name, parser in PARSERS.items() if parser is chosen)


def _tried(train: Callable[[], bool]) -> str:
    try:
        return "trains" if train() else "WRONG"
    except RollmeshError as error:
        return f"refused: {error.message}"


def row(found: Surveyed) -> tuple[str, ...]:
    """The table's row of a template."""
    if (facts := found.facts) is None:
        return (f"`{found.name}`", *["none"] * 4, found.sft, found.dpo, found.run)
    forms = sorted({form for forms in facts.contents.values() for form in forms})
    end = " ".join(f"`{token}`" for token in facts.end.tokens) or "none"
    thoughts = [f"opened: `{facts.opened_thoughts}`"] if facts.opened_thoughts else []
    thoughts += ["dropped later"] if facts.drops_thoughts else []
    calls = f"{facts.arguments}, read by {found.parser}" if facts.arguments else "none"
    following = " (next message)" if facts.end.written == "by the next message" else ""
    return (
        f"`{found.name}`", " or ".join(forms), (end + following).replace("|", "\\|"), ", ".join(thoughts) or "kept",
        calls, found.sft, found.dpo, found.run,
    )  # fmt: skip


def summary(found: Sequence[Surveyed]) -> dict[str, Any]:
    """Shares that train."""
    counts = {name: Counter(getattr(one, name).partition(":")[0] for one in found) for name in ("sft", "dpo", "run")}
    return {"templates": len(found), **{name: dict(count) for name, count in counts.items()}}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="folders with .jinja files")
    parser.add_argument("--json", type=Path, help="file for all findings")
    parser.add_argument("--page", type=Path, help="page whose table is written")
    options = parser.parse_args()
    paths = sorted({path for folder in options.folders for path in folder.rglob("*.jinja")}, key=lambda path: path.stem)
    found = [survey(path.stem, path.read_text(encoding="utf-8")) for path in paths]
    rows = [row(one) for one in found]
    print(table(HEADER, rows))
    print(summary(found))
    if options.json is not None:
        write_json(options.json, machine() | {"summary": summary(found), "templates": [asdict(one) for one in found]})
    if options.page is not None:
        text = options.page.read_text(encoding="utf-8")
        before, after = text.partition(_BEGIN)[0], text.partition(_END)[2]
        lines = "\n".join(f"| {' | '.join(cells)} |" for cells in [HEADER, ("---",) * len(HEADER), *rows])
        options.page.write_text(f"{before}{_BEGIN}\n{lines}\n{_END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
