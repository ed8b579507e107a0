"""The values of a table's cells, with their types. Every cell is checked."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.case import AXES, parse_value
from bench.errors import UsageError
from bench.record import Column, Status
from bench.store.attempts import FEW
from bench.store.table import is_axis, refuse_cell

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import pyarrow as pa

    Places = np.ndarray[Any, Any]  # of cells among the distinct ones

_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]{1,4})?")
_LARGEST_INT = 2**53  # whole numbers pass through float64


def type_table(path: Path, table: pa.Table, columns: dict[str, Column]) -> pd.DataFrame:
    """Convert the cells of a `read_text` of ``path`` to the types of `read_records`. Raises
    UsageError: a cell holds an invalid value."""
    import numpy as np
    import pandas as pd

    typed = {}
    few = len(table) < FEW
    no_text = np.full(len(table), "", object) if few else pd.array([""] * len(table), "str")
    nothing = {str: no_text, bool: np.zeros(len(table), bool)}
    no_number = np.full(len(table), math.nan)
    for name, column in columns.items():
        # most columns hold few distinct cells; 100,000 records took 3.0 s cell by cell
        distinct, places = _encode(table[name])
        if (
            len(distinct) == 1  # as most are in most sweeps
            and column.optional
            and not is_axis(column)
            and distinct[0].as_py() == ""
        ):
            typed[name] = nothing.get(column.type, no_number)
            continue
        for text in _suspects(column, distinct):
            if wrong := _wrong(column, text):
                refuse_cell(path, table, name, text, wrong)
        typed[name] = _read_cells(column.type, distinct, places)
    if not few:
        return pd.DataFrame(typed)
    # text as objects in one block: with few rows, a column is then read in a tenth of the time
    texts = [name for name, column in columns.items() if column.type is str]
    block = np.array([typed.pop(name) for name in texts], object).T
    text = pd.DataFrame(block.reshape(len(table), len(texts)), columns=texts, dtype=object)
    return pd.concat([text, pd.DataFrame(typed)], axis=1)[list(columns)]


def _encode(cells: pa.ChunkedArray) -> tuple[pa.Array, Places]:
    """Return the distinct cells, and the index of each cell among them."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    if len(cells) < FEW:
        texts = cells.to_pylist()
        found = {text: place for place, text in enumerate(dict.fromkeys(texts))}
        return pa.array(list(found), pa.string()), np.array([found[text] for text in texts], int)
    if pc.all(pc.equal(cells, cells[0])).as_py():  # a tenth of the time
        return cells.slice(0, 1).combine_chunks(), np.zeros(len(cells), int)
    encoded = cells.combine_chunks().dictionary_encode()
    return encoded.dictionary, encoded.indices.to_numpy()


def _suspects(column: Column, distinct: pa.Array) -> Any:
    """Return the cells to check one by one: of numbers, those that numpy finds odd."""
    import numpy as np
    import pyarrow as pa

    if is_axis(column) or column.name == "status" or column.type is bool:
        return distinct.to_pylist()
    if column.type is str:
        return []
    try:
        numbers = _parse_numbers(distinct)
    except pa.ArrowInvalid:
        return distinct.to_pylist()
    odd = ~(np.isfinite(numbers) & (abs(numbers) <= _LARGEST_INT))
    if column.type is int:
        odd |= numbers != np.floor(numbers)
    return distinct.filter(pa.array(odd)).to_pylist()


def _wrong(column: Column, text: str) -> str:
    """Return what would be right if a cell is invalid; empty if it is valid."""
    # an axis whose default is None is empty where it does not apply
    if is_axis(column) and (text or AXES[column.name].default is not None):
        try:
            parse_value(column.name, text.removeprefix("'"), "")
        except UsageError as error:
            return str(error).partition(": ")[2]
    if column.name == "status":
        return "" if text in list(Status) else f"a status is one of {', '.join(Status)}"
    if column.type is bool:
        return "" if text in ("on", "off", "") else "a boolean value is 'on' or 'off'"
    if column.type is str or (text == "" and column.optional):
        return ""
    if not (_NUMBER.fullmatch(text) and math.isfinite(float(text))):
        return "a finite number" + (", or empty" if column.optional else "")
    whole = text.removeprefix("-")
    if column.type is int and not (whole.isdigit() and float(whole) <= _LARGEST_INT):
        return f"a whole number, at most {_LARGEST_INT}"
    return ""


def _read_cells(kind: type, distinct: pa.Array, places: Places) -> Any:
    import numpy as np
    import pyarrow.compute as pc

    if kind is str:
        # pandas' methods for text took two thirds of the time of reading a short file
        bare = pc.replace_substring_regex(distinct, "^'", "", max_replacements=1)
        if len(places) < FEW:
            return np.array(bare.to_pylist(), object)[places]
        return bare.take(places).to_pandas()
    if kind is bool:
        return pc.equal(distinct, "on").to_numpy(zero_copy_only=False)[places]
    numbers = _parse_numbers(distinct)
    if kind is int and not np.isnan(numbers).any():
        numbers = numbers.astype("int64")
    return numbers[places]


def _parse_numbers(distinct: pa.Array) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    filled = pc.if_else(pc.equal(distinct, ""), None, distinct)
    return filled.cast(pa.float64()).to_numpy(zero_copy_only=False)
