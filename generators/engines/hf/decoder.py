"""The decode loop's body: one step, one swap. No threads here; the engine's thread calls it.

One step gives free slots to waiting requests and runs one forward pass over the rows in use. It draws a token for every
row, and closes the rows that have ended. A new row's first token is drawn from its prefix's logits in the same draw
(its row in the forward pass is padding). So a slot that became free is at work again in the very next step.

Invariant: a step that raises has changed no sequence. Those that were to start have no row, the others can continue.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from rollmesh.generators.engines.errors import EngineSettingsError
from rollmesh.generators.engines.hf.kv_budget import COLUMNS, Budget, Shape, free_bytes, rounded
from rollmesh.generators.engines.hf.kv_cache import SlotCache
from rollmesh.generators.engines.hf.model.attention_masks import MaskBuilder
from rollmesh.generators.engines.hf.model.expert_recorder import ExpertRecorder
from rollmesh.generators.engines.hf.model.loading import LoadedModel
from rollmesh.generators.engines.hf.model.prefill import HARMLESS, Prefiller, Prefix, PrefixBatch
from rollmesh.generators.engines.hf.model.traced_forward import DirectForward, ForwardPass, record
from rollmesh.generators.engines.hf.model.vision import Vision
from rollmesh.generators.engines.hf.probe import model_errors_named, probe
from rollmesh.generators.engines.hf.sampling import draw, next_uniform, state_after
from rollmesh.generators.engines.hf.slot_table import RunningSequence, SlotTable
from rollmesh.generators.engines.hf.waiting_queue import SharedPrompt, WaitingRequest, interrupted
from rollmesh.generators.engines.stop_strings import StopMatcher
from rollmesh.generators.engines.token_grammar import GrammarMatcher, TokenGrammars
from rollmesh.generators.engines.types import FinishReason, GenerationRequest, GenerationResult, TokenEvent
from rollmesh.mesh.trajectory.seeds import SEEDS
from rollmesh.mesh.trajectory.versions import PolicyVersion, VersionRuns

_NO_ROOM = Shape(1, 1)


@dataclass(slots=True)
class Step:
    """The outcome of one decode step: tokens of streamed sequences, and sequences that have ended."""

    events: list[TokenEvent] = field(default_factory=list)
    results: list[GenerationResult] = field(default_factory=list)


class Decoder:
    """The running sequences of one model.

    Args:
        loaded: the model.
        slots: sequences that are decoded together.
        kv_bytes: that keys and values may take; None: what the device has, see `free_bytes`.
        sharing: processes that share the device's memory.
        recorder: of the model's experts; None: they are not recorded.

    Attributes:
        table: of the sequences.
        serving: version of the weights; None without.
        tokens_generated, tokens_outside: sampled tokens, all and those of requests from outside of the run.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        slots: int,
        kv_bytes: int | None = None,
        sharing: int = 1,
        recorder: ExpertRecorder | None = None,
    ) -> None:
        self._recorder = recorder
        self._loaded = loaded
        self._model = loaded.model
        self._device = self._model.device
        self._masks = MaskBuilder(loaded.layer_types, loaded.window, self._model.dtype, self._device)
        self._forward_pass: ForwardPass = DirectForward(self._model)
        vision = None if loaded.images is None else Vision(self._model, loaded.images)
        self._prefiller = Prefiller(self._model, len(loaded.layer_types), self._masks, vision, recorder)
        self._kv_bytes = kv_bytes
        self._sharing = sharing
        # The bytes of a token are not known until the model has run.
        self._budget = self._allowed = Budget(slots * rounded(loaded.context), slots)
        self._cache = SlotCache(_NO_ROOM, loaded.layer_types, self._device)
        self._vocabulary = int(self._model.config.get_text_config().vocab_size)
        self._is_end = np.zeros(self._vocabulary, np.bool_)
        self._is_end[[token for token in loaded.eos_ids if 0 <= token < self._vocabulary]] = True
        self._grammars: TokenGrammars | None = None
        self.table = SlotTable(slots)
        self.serving: PolicyVersion | None = None
        self.tokens_generated = self.tokens_outside = 0

    @property
    def pinned(self) -> int:
        """Pinned sequences that are running."""
        return sum(1 for running in self.table.running if running is not None and running.request.pinned)

    @property
    def kv_usage(self) -> float:
        """Share of the budget for keys and values that running sequences take."""
        table = self.table
        return self._budget.usage(table.active, table.longest + 1) if table.active else 0.0

    def prefill(self, prompts: Sequence[SharedPrompt]) -> None:
        """Computes the prefixes of prompts."""
        prefixes = self._prefiller.run([prompt.ids for prompt in prompts], [prompt.images for prompt in prompts])
        for prompt, prefix in zip(prompts, prefixes, strict=True):
            prompt.prefix = prefix

    def fits(self, starting: int, longest: int) -> bool:
        """True where `starting` more, the longest with `longest` tokens, have room in the next step; one alone does."""
        rows = self.table.active + starting
        return rows == 1 or self._budget.fits(rows, max(self.table.longest, longest) + 1)

    def surplus(self) -> int:
        """Number of the sequences that started last and have no room in the next step."""
        table = self.table
        if not table.active or self._budget.fits(table.active, table.longest + 1):
            return 0
        rows = table.by_start()
        longest, keep = np.maximum.accumulate(table.position[rows]), len(rows)
        while keep > 1 and not self._budget.fits(keep, int(longest[keep - 1]) + 1):
            keep -= 1
        return len(rows) - keep

    def reserve(self, starting: Sequence[WaitingRequest]) -> None:
        """Makes room for the next step.

        Raises:
            RuntimeError, MemoryError: the memory is full; keys and values of running sequences are lost (`interrupt`).
        """
        self._compact_rows(spare=len(starting))
        rows = max(self.table.rows, self.table.active + len(starting))
        longest = max([self.table.longest, *(len(waiting.prompt.ids) for waiting in starting)])
        if not rows:
            return
        have = self._cache.shape
        shape = self._budget.shape(have, rows, longest + 1)
        if shape != have:
            try:
                self._cache.resize(shape, self.table.rows)
            except (RuntimeError, MemoryError):
                self.release()
                # More than there was cannot be had, until the next update of weights asks again.
                self._budget = replace(self._budget, tokens=max(have.rows * have.columns, self._budget.tokens // 2))
                raise

    def step(self, starting: Sequence[WaitingRequest]) -> Step:
        """Draws one token for every running sequence and for those in `starting`, after prefilling their prompts.

        Room has been reserved.
        """
        table = self.table
        new_rows: list[int] = []
        try:
            new_rows.extend(self._open(waiting) for waiting in starting)
            if not table.rows:
                return Step()
            tokens, log_probs, generator = self._draw(new_rows, starting)
        except Exception:  # whatever the model's own code raises, no row of it may stay
            for row in new_rows:
                table.clear_row(row)
            raise
        rows = table.rows
        table.generator[:rows] = generator
        table.position[:rows] += 1
        if new_rows:
            # They took no part in the forward pass.
            table.position[new_rows] -= 1
        table.record(tokens, log_probs)
        for row, grammar in table.grammars():
            grammar.push(int(tokens[row]))
        self.tokens_generated += rows
        self.tokens_outside += table.outside()
        assert self.serving is not None
        return Step(table.events(self.serving), self._close_ended(tokens))

    def check(self) -> None:
        """Prefills and decodes a few harmless tokens; an error here is no request's fault."""
        [prefix] = self._prefiller.run([HARMLESS])
        cache = SlotCache(Shape(1, COLUMNS), self._loaded.layer_types, self._device)
        row = torch.zeros(1, dtype=torch.int64, device=self._device)
        cache.store(row, prefix.batch.cache, row)
        position, columns = row + len(HARMLESS), len(HARMLESS) + 1
        cache.begin(position, columns)
        mask = self._masks.decode(position, columns)
        self._forward_pass(position[:, None], position[:, None], mask, cache)

    def abort(self, request_ids: set[str]) -> list[GenerationResult]:
        """Ends running sequences early."""
        return [
            self.table.close(row, "aborted")
            for row, running in enumerate(self.table.running)
            if running is not None and running.request.request_id in request_ids
        ]

    def interrupt(self, last: int | None = None) -> list[WaitingRequest]:
        """Stops running sequences without a result; they can continue from their tokens.

        Args:
            last: number of those that started last; None: all.

        Returns:
            Them, in the order in which they started.
        """
        rows = self.table.by_start()
        return [self._interrupted(row) for row in (rows if last is None else rows[len(rows) - last :])]

    def interrupt_requests(self, request_ids: Collection[str]) -> list[WaitingRequest]:
        """Stops the sequences with these ids, as `interrupt` does."""
        return [
            self._interrupted(row)
            for row, running in enumerate(self.table.running)
            if running is not None and running.request.request_id in request_ids
        ]

    def release(self) -> int:
        """Frees the storage of keys and values; returns its bytes. Running sequences have to be interrupted."""
        freed = self._cache.nbytes
        self._cache = SlotCache(_NO_ROOM, self._loaded.layer_types, self._device)
        return freed

    def prepare(self) -> None:
        """Chooses the forward pass of decode steps, and the size of the KV cache; called once, with the first weights.

        Raises:
            EngineSettingsError: the longest sequence has no room; the model is not computed right, see `probe`.
        """
        with model_errors_named(self._model):
            per_token, context = self._prefiller.bytes_per_token, rounded(self._loaded.context)
        allowed = self._kv_bytes
        if allowed is None:
            weights = sum(weight.nbytes for weight in self._model.parameters())
            allowed = free_bytes(self._device, weights, self._sharing)
        tokens = allowed // per_token
        if tokens < context:
            raise EngineSettingsError(
                f"the keys and values of one sequence of {context} tokens take {context * per_token / 2**30:.2g} GiB; "
                f"{allowed / 2**30:.2g} GiB are allowed for all",
                hint="raise rollout.hf.kv_cache_gib, or lower rollout.max_prompt_tokens, max_response_tokens or "
                "rollout.replicas",
            )
        self._budget = self._allowed = replace(self._budget, tokens=min(tokens, self._budget.tokens))
        # A recording calls no layers whose experts could be seen.
        if self._recorder is None:
            self._forward_pass = record(self._loaded, self._masks, self._prefiller)
        with model_errors_named(self._model):
            probe(self._loaded, self._forward_pass)

    def mark_serving(self, version: PolicyVersion) -> None:
        """Records that the model's weights are now those of `version`."""
        self.serving = version
        self._budget = self._allowed
        self.table.mark_serving(version)

    def recompute(self) -> None:
        """Replaces the cached keys and values of all running sequences by those of the present weights."""
        table = self.table
        self._compact_rows(spare=0)
        sequences = [table.tokens[row, : table.position[row]].tolist() for row in range(table.rows)]
        # There are no rows that have ended: they were compacted.
        images = [running.request.images if running is not None else () for running in table.running[: table.rows]]
        for rows, batch in self._prefiller.batches(sequences, images):
            self._store(rows, batch, list(range(len(rows))))

    def log_probs(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Log-probs of each next token, float32 [len(ids) - 1], nats."""
        log_probs: NDArray[np.float32] = self._prefiller.log_probs(ids).cpu().numpy()
        return log_probs

    def finish_reason(self, request: GenerationRequest) -> FinishReason | None:
        """The reason why nothing is to be sampled after a prefix; None where something is, or there is no prefix."""
        prefix = request.prefix
        if prefix is None:
            return None
        matcher, turn = self._matcher(request), prefix.last_turn
        if len(turn) and (self._is_end[turn[-1]] or (matcher and matcher.push(turn.tolist()))):
            return "stop"
        return "length" if len(prefix) >= self._limit(request) else None

    def _open(self, waiting: WaitingRequest) -> int:
        request, serving = waiting.request, self.serving
        assert serving is not None
        marks, drawn = [(0, serving)], 0
        matcher = self._matcher(request)
        if request.prefix is not None:
            drawn = len(request.prefix)
            marks = [*_marks(request.prefix.versions), (drawn, serving)]
            if matcher is not None:
                matcher.push(request.prefix.last_turn.tolist())
        seed = request.sampling.seed or secrets.randbelow(SEEDS)
        # Draws depend on the position alone: after a prefix none is used a second time.
        state = state_after(seed, drawn)
        running = RunningSequence(
            request, marks, matcher, self._grammar(request), started=waiting.started or time.monotonic()
        )
        return self.table.open(running, waiting.prompt.ids, self._limit(request), state)

    def _interrupted(self, row: int) -> WaitingRequest:
        running = self.table.running[row]
        assert running is not None
        partial = self.table.close(row, "aborted")
        return interrupted(replace(running.request, prefix=partial.sampled), running.started)

    def _limit(self, request: GenerationRequest) -> int:
        """Most tokens of its response."""
        return min(request.sampling.max_tokens, self._loaded.context - len(request.prompt_ids))

    def _matcher(self, request: GenerationRequest) -> StopMatcher | None:
        stop, tokenizer = request.sampling.stop, self._loaded.tokenizer
        return StopMatcher(tokenizer, stop) if stop and tokenizer else None

    def _grammar(self, request: GenerationRequest) -> GrammarMatcher | None:
        text, tokenizer, prefix = request.sampling.grammar, self._loaded.tokenizer, request.prefix
        if not text or tokenizer is None:
            return None
        if self._grammars is None:
            self._grammars = TokenGrammars(tokenizer, self._vocabulary, self._loaded.eos_ids)
        return self._grammars.matcher(text, [] if prefix is None else prefix.last_turn.tolist())

    def _compact_rows(self, *, spare: int) -> None:
        """Moves sequences from the end into holes until at most `spare` holes are left for new ones."""
        while len(self.table.holes) > spare:
            move = self.table.next_move()
            if move is not None:
                self._cache.move(*move, columns=int(self.table.position[move[1]]))

    def _draw(
        self, new_rows: list[int], starting: Sequence[WaitingRequest]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.uint64]]:
        """Tokens, log-probs and the generators' next states of all rows."""
        table, rows = self.table, self.table.rows
        table.reserve(table.longest + 2)
        logits = self._forward(new_rows, starting)
        generator = table.generator[:rows].copy()
        uniform = torch.from_numpy(next_uniform(generator)).to(self._device)
        if grammars := table.grammars():
            # The recorded forward pass writes into the same memory each time.
            logits = logits.clone()
            for row, grammar in grammars:
                forbidden = torch.from_numpy(~grammar.allowed()).to(self._device)
                logits[row].masked_fill_(forbidden, -torch.inf)
        ids, log_probs = draw(logits, uniform, table.sampling(self._device))
        return ids.cpu().numpy(), log_probs.cpu().numpy(), generator

    def _forward(self, new_rows: list[int], starting: Sequence[WaitingRequest]) -> torch.Tensor:
        """Logits [rows, vocabulary] of every row's next token."""
        table = self.table
        rows = table.rows
        batches = _by_batch([_prefix(waiting) for waiting in starting])
        targets = [
            (self._store([new_rows[member] for member, _ in members], batch, [index for _, index in members]), batch)
            for batch, members in batches
        ]
        for batch, members in batches:
            if batch.experts is not None:
                for member, index in members:
                    tokens = len(starting[member].prompt.ids)
                    table.record_prefix_experts(new_rows[member], batch.experts[index, :tokens])
        if len(new_rows) < rows:
            logits = self._decode()
        else:
            logits = batches[0][0].logits.new_empty((rows, batches[0][0].logits.shape[1]))
        for (row_index, source), batch in targets:
            logits[row_index] = batch.logits.index_select(0, source)
        return logits

    def _store(self, rows: list[int], batch: PrefixBatch, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        row_index = torch.tensor(rows, device=self._device)
        source = torch.tensor(indices, device=self._device)
        self._cache.store(row_index, batch.cache, source)
        return row_index, source

    def _decode(self) -> torch.Tensor:
        table, rows = self.table, self.table.rows
        position = table.position[:rows]
        columns = int(position.max()) + 1
        positions = torch.from_numpy(position).to(self._device)
        input_ids = torch.from_numpy(table.last_token[:rows, None]).to(self._device)
        self._cache.begin(positions, columns)
        mask = self._masks.decode(positions, columns)
        if self._recorder is None:
            return self._forward_pass(input_ids, positions[:, None], mask, self._cache)
        with self._recorder.recording():
            logits = self._forward_pass(input_ids, positions[:, None], mask, self._cache)
            table.record_experts(self._recorder.taken())
        return logits

    def _close_ended(self, tokens: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[GenerationResult]:
        table, rows = self.table, self.table.rows
        stopped = self._is_end[tokens]
        for row in table.rows_with_stop_strings():
            running = table.running[row]
            if running is not None and running.matcher is not None and running.matcher.push([int(tokens[row])]):
                stopped[row] = True
        ended = stopped | (table.position[:rows] >= table.last_position[:rows])
        if not ended.any():
            return []
        return [table.close(row, "stop" if stopped[row] else "length") for row in np.flatnonzero(ended).tolist()]


def _marks(versions: VersionRuns) -> list[tuple[int, PolicyVersion]]:
    """(index of the first token, version) of each run."""
    starts = accumulate((length for length, _ in versions.runs), initial=0)
    return [(start, version) for start, (_, version) in zip(starts, versions.runs, strict=False)]


def _prefix(waiting: WaitingRequest) -> Prefix:
    prefix = waiting.prompt.prefix
    assert prefix is not None
    return prefix


def _by_batch(prefixes: Sequence[Prefix]) -> list[tuple[PrefixBatch, list[tuple[int, int]]]]:
    """Prefixes grouped by their forward pass: (batch, [(position in `prefixes`, index in the batch)])."""
    groups: dict[int, tuple[PrefixBatch, list[tuple[int, int]]]] = {}
    for member, (batch, index) in enumerate(prefixes):
        groups.setdefault(id(batch), (batch, []))[1].append((member, index))
    return list(groups.values())
