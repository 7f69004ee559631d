"""JSON that keeps a schema: the last fenced block of the response, or the whole of it.

The schema is that of the function's name (`json_schema:FILE`), `extra_info.json_schema`, or the ground truth, as an
object or as its text. `$schema` names its draft; without it 2020-12 counts. References lead inside the schema alone,
and nothing is fetched.

`json_schema` gives 1 to an answer without an error. `json_schema_fraction` gives the share of parts without one. Parts
are the properties that the schema names or requires, and one more for all other rules. A property that may be missing
is a part only where the answer has it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from rollmesh.mesh.errors import RewardError
from rollmesh.reward_service.outcomes import Outcome, RewardItem, Scored, Unscorable
from rollmesh.reward_service.scorers.forms.json_answer import NoJsonError, answer_text, read
from rollmesh.reward_service.scorers.truths import TruthError, TruthScorer, uses_row

FIELD = "json_schema"
# Schemas that are kept checked and ready.
_KEPT = 256


class SchemaError(TruthError):
    """A schema that cannot be used."""


def with_file(path: str, *, fraction: bool) -> Callable[[RewardItem], Outcome]:
    """The scorer of one schema for all rows.

    Raises:
        RewardError: the file cannot be read, or holds no schema.
    """
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
        _validator(text)
    except (OSError, ValueError) as error:
        raise RewardError(f"json_schema: {path}: {error}", hint="write json_schema:FILE, a JSON schema") from error
    return TruthScorer(lambda _: _validator(text), partial(_judge, fraction=fraction))


def load_library() -> None:
    """Imports the library, which takes a tenth of a second, and reads a first schema."""
    _validator("{}")


def validator_of(item: RewardItem) -> Any:
    """The validator of a row's own schema.

    Raises:
        TruthError: it has none that can be used.
    """
    own = item.extra_info.get(FIELD)
    schema = item.ground_truth if own is None else own
    if schema is None:
        raise TruthError(f"the row has no schema: give extra_info.{FIELD}, or a ground truth that is one")
    return _validator(schema if isinstance(schema, str) else json.dumps(schema, sort_keys=True))


@uses_row(validator_of)
def score(item: RewardItem, validator: Any) -> Outcome:
    """1.0 or 0.0, with the components `format` (it is JSON) and `fraction`."""
    return _judge(item, validator, fraction=False)


@uses_row(validator_of)
def score_fraction(item: RewardItem, validator: Any) -> Outcome:
    """The share of parts that keep the schema, with the components `format` and `all`."""
    return _judge(item, validator, fraction=True)


def _judge(item: RewardItem, validator: Any, *, fraction: bool) -> Outcome:
    from referencing.exceptions import Unresolvable

    other = "all" if fraction else "fraction"
    try:
        answer = read(answer_text(item.response))
    except NoJsonError:
        return Scored(0.0, {"format": 0.0, other: 0.0}, answer="")
    try:
        share = _share(validator, answer)
    except Unresolvable as error:
        return Unscorable(f"the schema refers to something that it does not contain: {error}")
    whole = float(share == 1.0)
    total, rest = (share, whole) if fraction else (whole, share)
    return Scored(total, {"format": 1.0, other: rest}, answer=json.dumps(answer, sort_keys=True))


@lru_cache(_KEPT)
def _validator(text: str) -> Any:
    """The validator of a schema.

    Raises:
        SchemaError: the text holds no schema.
    """
    import jsonschema
    from jsonschema import validators
    from jsonschema_specifications import REGISTRY

    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"the schema is not JSON: {error}") from error
    if not isinstance(schema, bool | Mapping):
        raise SchemaError(f"the schema is no object: {text[:80]}")
    kind = validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise SchemaError(f"no schema: {error.message}") from error
    # The published drafts alone: the default registry fetches what a reference names.
    return kind(schema, registry=REGISTRY)


def _share(validator: Any, answer: Any) -> float:
    """The share of parts without an error."""
    schema = validator.schema if isinstance(validator.schema, Mapping) else {}
    errors = list(validator.iter_errors(answer))
    # An answer that is no object cannot be right in part.
    if not isinstance(answer, dict):
        return float(not errors)
    required = frozenset(schema.get("required", ()))
    parts = required | (frozenset(schema.get("properties", ())) & answer.keys())
    failed: set[str | None] = set(required - answer.keys())
    for error in errors:
        name = error.absolute_path[0] if error.absolute_path else None
        if name in parts:
            failed.add(name)
        elif list(error.absolute_schema_path) != ["required"]:
            failed.add(None)
    return 1.0 - len(failed) / (len(parts) + 1)
