"""The data of a run, read as its learner would read them, with everything that is found on the way.

Nothing is started. Every row is tokenised, so that large data take minutes. Memory holds keys of the prompts, some
hundred bytes for each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rollmesh.data.prompt_keys import exact_key, normalized_key
from rollmesh.data.reading import read_all
from rollmesh.data.shown_row import Piece, pieces_of
from rollmesh.learner.coordinator.prompt_sources import evaluation_encoder, training_encoder
from rollmesh.learner.data.dataset import open_source
from rollmesh.learner.data.parts.template_marks import PROMPT_MISSES_TEMPLATE, TemplateMarks
from rollmesh.learner.data.prompts import PromptEncoder
from rollmesh.learner.data.rows import Row
from rollmesh.learner.model_files.location import embedding_rows
from rollmesh.learner.model_files.tokenizer_checks import check_tokenizer
from rollmesh.learner.written.ends import end_notices
from rollmesh.mesh.chat.facts import TemplateFacts
from rollmesh.mesh.chat.probing import facts_of
from rollmesh.mesh.chat.template import ChatTemplate
from rollmesh.mesh.config import Config
from rollmesh.mesh.config.inputs import DataSource, ModelSection
from rollmesh.mesh.config.scorers.parts import uses
from rollmesh.mesh.errors import ChatTemplateError, DataError, RollmeshError
from rollmesh.mesh.tokenizer_files import load_tokenizer
from rollmesh.reward_service.outcomes import RewardItem
from rollmesh.reward_service.row_faults import fault_of
from rollmesh.reward_service.scorers.auto import scorer_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Fewer row groups in memory mix too few rows.
_FEW_GROUPS = 4


@dataclass(slots=True)
class Finding:
    """One thing that is wrong with rows.

    Attributes:
        what: in words; rows of one kind have the same.
        fails: a run would end by it; otherwise it trains without these rows, or with them.
        note: nothing is wrong if the rows are meant so.
        count: of rows.
        examples: the first of them: file and number, and what is special about each.
    """

    what: str
    fails: bool
    note: bool = False
    count: int = 0
    examples: list[str] = field(default_factory=list)


@dataclass(slots=True)
class SourceReport:
    """The contents of one source.

    Attributes:
        key: `data.train` or `data.eval`.
        label: of the source.
        rows: that it has.
        lengths: number of prompts, or of rows, by their tokens, without empty ones.
        data_sources: number of rows by data_source.
        findings: by kind.
    """

    key: str
    label: str
    rows: int = 0
    lengths: Counter[int] = field(default_factory=Counter)
    data_sources: Counter[str] = field(default_factory=Counter)
    findings: dict[str, Finding] = field(default_factory=dict)

    def add(self, what: str, example: str, *, fails: bool = False, note: bool = False, most: int) -> None:
        """Counts a row under a finding, and names it where there are few."""
        finding = self.findings.setdefault(what, Finding(what, fails, note))
        finding.count += 1
        if len(finding.examples) < most:
            finding.examples.append(example)

    def add_unusable(self, error: DataError, *, most: int) -> None:
        """Counts a row that cannot be used; rows with the same advice are one finding."""
        what = f"the row cannot be used: {error.hint}" if error.hint else "the row cannot be used"
        self.add(what, error.message, fails=True, most=most)


@dataclass(slots=True)
class DataReport:
    """All that was found.

    Attributes:
        measured: whose tokens are counted.
        max_tokens: longer ones are skipped, or refused.
        sources: in the order of the configuration.
        template: facts about the model's chat template; None: it has none, or none that can be used.
        row: the first one of all, as it is trained.
        remarks: on the model's files.
    """

    measured: Literal["prompt", "row"]
    max_tokens: int
    sources: list[SourceReport]
    template: TemplateFacts | None = None
    row: list[Piece] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def errors(self) -> list[Finding]:
        """Findings by which a run would end."""
        return [finding for source in self.sources for finding in source.findings.values() if finding.fails]

    @property
    def warnings(self) -> list[Finding]:
        """Findings of rows that a run skips, or trains on in doubt."""
        found = (finding for source in self.sources for finding in source.findings.values())
        return [finding for finding in found if not (finding.fails or finding.note)]

    @property
    def notes(self) -> list[Finding]:
        """Findings that may be meant."""
        return [finding for source in self.sources for finding in source.findings.values() if finding.note]


def check_data(config: Config, *, examples: int) -> DataReport:
    """Reads all rows of a configuration.

    Args:
        config: of a run.
        examples: rows that are named for each finding.

    Raises:
        DataError: the tokenizer cannot be loaded. Everything about the data is a finding.
    """
    tokenizer = load_check_tokenizer(config.model)
    known = _Known()
    reports = []
    encoder = training_encoder(config, tokenizer)
    for source in config.data.train:
        check = _SourceCheck(config, "data.train", source, encoder, known, examples)
        reports.append(check.run(trained=True))
    if config.data.eval is not None:
        encoder = evaluation_encoder(config, tokenizer)
        for source in config.data.eval:
            check = _SourceCheck(config, "data.eval", source, encoder, known, examples)
            reports.append(check.run(trained=False))
    template = known_facts(tokenizer, config.data.chat_template_kwargs)
    return DataReport("prompt", config.rollout.max_prompt_tokens, reports, template, known.row, end_notices(config))


def known_facts(tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any]) -> TemplateFacts | None:
    """Facts about a tokenizer's chat template; None without one, or if the rows' findings say why it cannot be used.

    Args:
        tokenizer: of the model.
        kwargs: `data.chat_template_kwargs`.
    """
    try:
        return facts_of(ChatTemplate.of(tokenizer, kwargs))
    except ChatTemplateError:
        return None


def load_check_tokenizer(model: ModelSection) -> PreTrainedTokenizerBase:
    """The tokenizer of a model; of a hub id nothing else is fetched.

    Raises:
        DataError: it cannot be loaded, or has tokens that the model has no embedding for.
    """
    folder = Path(model.path)
    if folder.is_dir():
        if (places := embedding_rows(folder)) is not None:
            check_tokenizer(folder, "model.path", places)
        return load_tokenizer(folder)
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            model.path, revision=model.revision or "main", trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise DataError(
            f"model.path: the tokenizer of {model.path} cannot be had: {error}",
            hint="give a Hugging Face model folder, or a hub id",
        ) from error
    return tokenizer


class _Known:
    """The prompts that were read so far."""

    def __init__(self) -> None:
        self.exact: set[tuple[str, int]] = set()
        """Sides, `data.train` and `data.eval`, with the exact keys of their prompts."""
        self.trained: dict[int, tuple[str, str]] = {}
        """By normalized key: origin and ground truth of the first such row in the training data."""
        self.held_out: dict[int, tuple[str, str]] = {}
        self.row: list[Piece] = []
        """The first prompt, in pieces."""


class _SourceCheck:
    """Reads one source."""

    def __init__(
        self, config: Config, key: str, source: DataSource, encoder: PromptEncoder, known: _Known, examples: int
    ) -> None:
        self._config = config
        self._source = source
        self._encoder = encoder
        self._marks = TemplateMarks(encoder.tokenizer)
        self._known = known
        self._most = examples
        self._report = SourceReport(key, source.label)

    def run(self, *, trained: bool) -> SourceReport:
        """The report of the source.

        Args:
            trained: it is of the training data; otherwise held-out prompts are looked for among these.
        """
        try:
            rows = open_source(self._source, self._config.data.prompt_key, checked=False)
        except DataError as error:
            self._add("the source cannot be used", str(error), fails=True)
            return self._report
        self._report.rows = len(rows)
        if rows.blocks is not None and rows.blocks.window < _FEW_GROUPS:
            what = f"only {rows.blocks.window} row groups fit into memory at a time, so that rows are hardly shuffled"
            self._add(f"{what}: write the file with row groups of 1,000 rows", self._source.label)
        usable = 0
        for _, row in read_all(rows):
            if isinstance(row, DataError):
                self._report.add_unusable(row, most=self._most)
                continue
            self._report.data_sources[row.data_source] += 1
            self._measure(row)
            if self._misses_template(row):
                self._report.add(PROMPT_MISSES_TEMPLATE, row.origin, note=True, most=self._most)
            self._compare(row, trained=trained)
            if not self._is_scored(row):
                what = f"no reward function scores data_source {row.data_source!r}"
                self._add(f"{what}: set reward.functions, or reward.by_data_source", row.origin, fails=True)
            usable += self._can_be_scored(row)
        if not any(count for length, count in self._report.lengths.items() if length <= self._limit):
            self._add("no prompt of the source can be used", self._source.label, fails=True)
        elif not usable and self._report.data_sources:
            self._add("no row of the source can be scored", self._source.label, fails=True)
        return self._report

    @property
    def _limit(self) -> int:
        return self._config.rollout.max_prompt_tokens

    def _add(self, what: str, example: str, *, fails: bool = False) -> None:
        self._report.add(what, example, fails=fails, most=self._most)

    def _measure(self, row: Row) -> None:
        refused = self._config.data.on_long_prompt == "refuse" and self._report.key == "data.train"
        try:
            ids = self._encoder.ids(row)
        except RollmeshError as error:
            self._add("the prompt cannot be made", str(error), fails=True)
            return
        if not ids:
            self._add("the prompt is empty", row.origin, fails=refused)
            return
        if not self._known.row:
            self._known.row = pieces_of(self._encoder.tokenizer, ids, [False] * len(ids))
        length = len(ids)
        self._report.lengths[length] += 1
        if length > self._limit:
            what = f"the prompt is over rollout.max_prompt_tokens ({self._limit})"
            self._add(what, f"{row.origin}: {length} tokens", fails=refused)

    def _misses_template(self, row: Row) -> bool:
        # A program writes its conversation itself.
        own = self._config.rollout.agent.kind == "program"
        return not own and isinstance(row.prompt, str) and self._marks.are_missing(row.prompt)

    def _compare(self, row: Row, *, trained: bool) -> None:
        """Looks for the prompt among those before it: of its own side, and of held-out ones in the training data."""
        exact, key = exact_key(row.prompt, row.images), normalized_key(row.prompt, row.images)
        truth = repr(row.ground_truth)
        if not trained and key in self._known.trained:
            self._add("the prompt is held out, and trained on", f"{row.origin} is {self._known.trained[key][0]}")
        own = self._known.trained if trained else self._known.held_out
        if key not in own:
            own[key] = (row.origin, truth)
        elif own[key][1] != truth:
            self._add("the prompt is there twice, with other ground truths", f"{row.origin} is {own[key][0]}")
        elif (self._report.key, exact) in self._known.exact:
            self._add("the prompt is there twice", f"{row.origin} is {own[key][0]}")
        else:
            self._add("the prompt is there twice, written otherwise", f"{row.origin} is {own[key][0]}")
        self._known.exact.add((self._report.key, exact))

    def _is_scored(self, row: Row) -> bool:
        """True unless `auto` alone would score the row, and does not know its source."""
        reward, agent = self._config.reward, self._config.rollout.agent
        if row.data_source in reward.by_data_source or reward.endpoints or agent.kind in ("environment", "program"):
            return True
        return any(name != "auto" for name in uses(reward.functions)) or scorer_of(row.data_source) is not None

    def _can_be_scored(self, row: Row) -> bool:
        """Reports the scorers that cannot use a row's ground truth; false where none of its functions can."""
        reward, agent = self._config.reward, self._config.rollout.agent
        if reward.endpoints or agent.kind in ("environment", "program"):
            return True
        functions = uses(reward.by_data_source.get(row.data_source, reward.functions))
        item = RewardItem("", "", row.data_source, "", "", row.ground_truth, row.extra_info)
        faults = {name: fault for name in functions if (fault := fault_of(name, item))}
        for name, fault in faults.items():
            self._add(f"the row is unscorable by {name}, and counts for nothing there", f"{row.origin}: {fault}")
        return len(faults) < len(set(functions))
