"""The version of every token of a request: tokens are delivered only when their version is certain.

With the last event of a request the server reports the version of each of its tokens (spans). Every event bears the
version in service, as far as the server's front knew when it had the event from the scheduler. Invariants:

- Tokens that came before an update of the weights began were sampled by the version at which the request was made. They
  are attributed when they come.
- The front knows of an update before the server continues after it. So tokens of an event that bears the former version
  are of that version, however late they come. Only one of several fronts knows of it.
- The version of tokens of an event that bears a newer version is uncertain. They may have been sampled before the
  pause, and have reached the front after the news of the update, which takes another way. They, and all after them, are
  held back until the spans are there.
- The spans must agree with all earlier attributions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollmesh.generators.engines.errors import EngineError


@dataclass(frozen=True, slots=True)
class Event:
    """New tokens of one request to the server.

    Attributes:
        token_ids, log_probs: of the new tokens.
        reason: why it ended (SGLang's `type`: stop, length, abort); None where it continues.
        error: the server's error message for the request; empty without one.
        meta: the rest of the event.
    """

    token_ids: list[int]
    log_probs: list[float]
    reason: str | None
    error: str
    meta: dict[str, Any]


class EventReader:
    """Reads the events of one stream.

    Args:
        incremental: whether an event brings its new tokens alone.
        filtered: log-probs are those of the kept set (`return_sampling_mask`).
    """

    def __init__(self, *, incremental: bool, filtered: bool) -> None:
        self._incremental = incremental
        self._key = "output_token_sampling_logprobs" if filtered else "output_token_logprobs"
        self._seen = 0

    def read(self, data: dict[str, Any]) -> Event:
        """The next event.

        Raises:
            EngineError: it contradicts itself.
        """
        if "error" in data:
            error = data["error"]
            return Event([], [], None, str(error.get("message", error) if isinstance(error, dict) else error), {})
        meta = data["meta_info"]
        finish = meta.get("finish_reason")
        reason = None if finish is None else str(finish["type"])
        if finish is not None and reason == "abort" and (finish.get("status_code") or 0) >= 400:
            # It bears a token without a log-prob where the server has refused the request itself, as for its grammar.
            return Event([], [], reason, str(finish["message"]), meta)
        # The last event of a request that was aborted in the queue repeats tokens: the count identifies the new ones.
        new = int(meta["completion_tokens"]) - self._seen
        begin = 0 if self._incremental else self._seen
        ids = data.get("output_ids", [])[begin : begin + new]
        entries = (meta.get(self._key) or [])[begin : begin + new]
        if len(ids) != new or len(entries) != new:
            raise EngineError(
                f"the SGLang server counts {new} new tokens and sends {len(ids)} and {len(entries)} log-probs"
            )
        self._seen += new
        log_probs = entries if "sampling" in self._key else [entry[0] for entry in entries]
        return Event(ids, log_probs, reason, "", meta)


class VersionAttributor:
    """Attributes the tokens of one request to versions.

    Args:
        label: of the weights in service when it was made.
        one_front: see above.

    Attributes:
        saw_update: an update has begun since.
        undecided: ids and log-probs of tokens that are held back.
    """

    def __init__(self, label: str, *, one_front: bool) -> None:
        self._one_front = one_front
        self._label = label
        self._attributed: list[tuple[int, str]] = []
        self.saw_update = False
        self.undecided: tuple[list[int], list[float]] = ([], [])

    @property
    def total(self) -> int:
        """Tokens that have come."""
        return sum(length for length, _ in self._attributed) + len(self.undecided[0])

    def add(self, event: Event) -> tuple[list[int], list[float], list[tuple[int, str]]]:
        """Adds an event; returns the tokens that are certain now, with their runs.

        Raises:
            EngineError: the server's spans contradict earlier attributions, or do not cover all tokens.
        """
        certain = not self.undecided[0] and self._is_certain(event)
        self.undecided[0].extend(event.token_ids)
        self.undecided[1].extend(event.log_probs)
        if event.reason is not None:
            runs = self._runs_by_spans(event.meta.get("weight_versions") or [])
        elif certain:
            runs = [(len(event.token_ids), self._label)] if event.token_ids else []
        else:
            return [], [], []
        (ids, log_probs), self.undecided = self.undecided, ([], [])
        for length, label in runs:
            if self._attributed and self._attributed[-1][1] == label:
                length += self._attributed.pop()[0]
            self._attributed.append((length, label))
        return ids, log_probs, runs

    def _is_certain(self, event: Event) -> bool:
        """True where all tokens of an event are of the version of those before them."""
        return not self.saw_update or (self._one_front and str(event.meta.get("weight_version")) == self._label)

    def _runs_by_spans(self, spans: Sequence[dict[str, Any]]) -> list[tuple[int, str]]:
        """Runs of the tokens that are held, by the server's spans over all of them."""
        total = self.total
        runs, covered = [], 0
        for span in spans:
            label, begin, end = str(span["version"]), int(span["start"]), min(int(span["end"]), total)
            if begin != covered or end < begin:
                break
            covered = end
            if end > begin:
                runs.append((end - begin, label))
        if covered != total:
            raise EngineError(f"the SGLang server says of {covered} of {total} tokens which version they have: {spans}")
        for length, label in self._attributed:
            if not runs or runs[0][1] != label or runs[0][0] < length:
                raise EngineError(
                    f"tokens that were sampled by versions {self._attributed} are said to be of {spans}",
                    hint="does another program load weights into the SGLang server?",
                )
            runs[0] = (runs[0][0] - length, label)
            if not runs[0][0]:
                runs.pop(0)
        return runs
