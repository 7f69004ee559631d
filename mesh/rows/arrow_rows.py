"""Rows of Arrow and Parquet files as objects, each with the fields of its own.

A struct of Arrow has the fields of every row, and null for those that a row lacks. Only the row's own remain here.
Maps have the keys of their own row, and become objects too. Columns stay as they are: each row has all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa

_Cleaner = Callable[[Any], Any]


def rows_of(table: pa.Table | pa.RecordBatch) -> list[dict[str, Any]]:
    """The rows of a table or batch, in their order."""
    rows: list[dict[str, Any]] = table.to_pylist()
    for field in table.schema:
        if (clean := _cleaner_of(field.type)) is not None:
            for row in rows:
                row[field.name] = clean(row[field.name])
    return rows


def _cleaner_of(kind: pa.DataType) -> _Cleaner | None:
    """Removes the fields of structs that are null from values of a type; None if it holds neither struct nor map.

    Nulls in lists and in maps remain: no schema adds these.
    """
    if pa.types.is_struct(kind):
        fields = {field.name: _cleaner_of(field.type) for field in kind}
        return lambda value: None if value is None else _present(value, fields)
    if pa.types.is_map(kind):
        within = _cleaner_of(kind.item_type)
        return lambda value: None if value is None else {key: _cleaned(item, within) for key, item in value}
    if isinstance(kind, pa.ListType | pa.LargeListType | pa.FixedSizeListType | pa.ListViewType | pa.LargeListViewType):
        within = _cleaner_of(kind.value_type)
        if within is not None:
            return lambda value: None if value is None else [_cleaned(item, within) for item in value]
    return None


def _present(value: dict[str, Any], fields: dict[str, _Cleaner | None]) -> dict[str, Any]:
    return {name: _cleaned(item, fields[name]) for name, item in value.items() if item is not None}


def _cleaned(value: Any, cleaner: _Cleaner | None) -> Any:
    return value if cleaner is None else cleaner(value)
