"""Which version every token of a request has: only what is certain is said.

The server tells with the last event of a request which of its tokens which version sampled (spans). Every event bears
the version in service, as far as the server's front knew when it had the event from the scheduler. Invariants:

- Tokens that have come before an update of the weights began were sampled by the version at which the request was
  made: they are stamped when they come.
- The front knows of an update before the server continues after it. So tokens of an event that bears the former version
  are of that version, however late they come. (Where there are several fronts, only one of them knows.)
- Of tokens of an event that bears a newer version that cannot be told from outside: they may have been sampled before
  the pause, and have reached the front after the news of the update, which goes another way. They are held back until
  the spans are there, and all after them.
- The spans must agree with everything that was said before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollmesh.generators.engines.interface import EngineError


@dataclass(frozen=True, slots=True)
class Event:
    """New tokens of one request to the server.

    Attributes:
        token_ids, log_probs: of the new tokens.
        reason: why it ended (SGLang's `type`: stop, length, abort); None where it goes on.
        error: what the server says is wrong with the request; empty where nothing is.
        meta: what else was said.
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
            said = data["error"]
            return Event([], [], None, str(said.get("message", said) if isinstance(said, dict) else said), {})
        meta = data["meta_info"]
        # The last event of a request that was aborted in the line repeats tokens: the count says what is new.
        new = int(meta["completion_tokens"]) - self._seen
        begin = 0 if self._incremental else self._seen
        ids = data.get("output_ids", [])[begin : begin + new]
        found = (meta.get(self._key) or [])[begin : begin + new]
        if len(ids) != new or len(found) != new:
            raise EngineError(
                f"the SGLang server counts {new} new tokens and sends {len(ids)} and {len(found)} log-probs"
            )
        self._seen += new
        finish = meta.get("finish_reason")
        reason = None if finish is None else str(finish["type"])
        wrong = reason == "abort" and (finish.get("status_code") or 0) >= 400
        log_probs = found if "sampling" in self._key else [entry[0] for entry in found]
        return Event(ids, log_probs, reason, str(finish["message"]) if wrong else "", meta)


class VersionAttributor:
    """Stamps the tokens of one request.

    Args:
        label: of the weights in service when it was made.
        one_front: see above.

    Attributes:
        crossed: an update has begun since.
        held: ids and log-probs of tokens that are held back.
    """

    def __init__(self, label: str, *, one_front: bool) -> None:
        self._one_front = one_front
        self._label = label
        self._said: list[tuple[int, str]] = []
        self.crossed = False
        self.held: tuple[list[int], list[float]] = ([], [])

    @property
    def total(self) -> int:
        """Tokens that have come."""
        return sum(length for length, _ in self._said) + len(self.held[0])

    def add(self, event: Event) -> tuple[list[int], list[float], list[tuple[int, str]]]:
        """Takes an event; gives the tokens that are certain now, with their runs.

        Raises:
            EngineError: the server's spans contradict what was said before, or do not cover all tokens.
        """
        certain = not self.held[0] and self._is_certain(event)
        self.held[0].extend(event.token_ids)
        self.held[1].extend(event.log_probs)
        if event.reason is not None:
            runs = self._settle(event.meta.get("weight_versions") or [])
        elif certain:
            runs = [(len(event.token_ids), self._label)] if event.token_ids else []
        else:
            return [], [], []
        (ids, log_probs), self.held = self.held, ([], [])
        for length, label in runs:
            if self._said and self._said[-1][1] == label:
                length += self._said.pop()[0]
            self._said.append((length, label))
        return ids, log_probs, runs

    def _is_certain(self, event: Event) -> bool:
        """Whether all tokens of an event are of the version of those before them."""
        return not self.crossed or (self._one_front and str(event.meta.get("weight_version")) == self._label)

    def _settle(self, spans: Sequence[dict[str, Any]]) -> list[tuple[int, str]]:
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
        for length, label in self._said:
            if not runs or runs[0][1] != label or runs[0][0] < length:
                raise EngineError(
                    f"tokens that were sampled by versions {self._said} are said to be of {spans}",
                    hint="does somebody else load weights into the SGLang server?",
                )
            runs[0] = (runs[0][0] - length, label)
            if not runs[0][0]:
                runs.pop(0)
        return runs
