"""Joining folders into another one, and checking that they may be joined.

The content of the joined folder does not depend on the order in which they are joined.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.axis import Value
from bench.case import format_value, list_values, spell_cases
from bench.errors import UsageError
from bench.flags import writable
from bench.record import COLUMNS, COMPARABLE
from bench.store.attempts import find_unknown, number_groups
from bench.store.cells import CONFIG, LOGS, RECORDS, TABLES, TRACES, spell_config
from bench.store.plans import JOINED, MERGED, Plan, read_own_plan, read_plans, write_plans
from bench.store.reader import read_config, records_file
from bench.store.table import read_text
from bench.store.values import type_table
from bench.store.writer import Store, find_torn_tail, write_table
from bench.text import replace_file

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

SEVERAL = "several"
"""The preset in the configuration if the sweeps had different ones."""

_ORDER = ("finished_at", "started_at", "record_id")
_PLACED = frozenset({"log", "schema"})  # cells that joining changes


@dataclass
class Source:
    """A folder to join: its tables as text, by file, its configuration, and typed records. The
    records are read before the other tables, and a sweep writes a record last: so all rows of each
    record are there, even if the sweep still runs."""

    folder: Path
    tables: dict[str, pa.Table]
    records: pd.DataFrame
    config: Mapping[str, Any] = field(default_factory=dict)


def join_folders(folders: Iterable[Path], out: Path, mix: bool) -> tuple[Source, Source]:
    """Join folders, and what is in ``out`` already, into ``out``. Return ``out`` as it was before,
    and the union. Raises UsageError: they cannot be joined."""
    # out is joined in any case
    apart = {path.resolve(): path for path in folders if path.resolve() != out.resolve()}
    sources = [read_source(path) for path in apart.values()]
    # first, so that nothing is written for folders that cannot be joined
    refuse_schemas(sources)
    refuse_unlike(sources, mix)
    with writable("--out", out):
        claim(out)
        with Store(out) as store:
            store.migrate()
            before = read_source(out)
            refuse_unlike([*sources, before], mix)
            return before, write_union(out, [*sources, before])


def read_source(folder: Path) -> Source:
    """Read a sweep's folder. Raises UsageError: there are no records, a file has an unfinished last
    line, or as `read_records`."""
    if not folder.is_dir():
        raise UsageError(f"{folder}: no folder there; give one that `bench.sweep --out` wrote")
    tables = {}
    for name, columns in TABLES.items():
        file = records_file(folder) if name == RECORDS else folder / name
        if not file.is_file():
            continue
        if find_torn_tail(file):
            raise UsageError(
                f"{file}: its last line is not finished; wait for its sweep, or run the sweep's "
                "command again, which sets the line aside"
            )
        tables[name] = read_text(file, columns)
    records = type_table(folder / RECORDS, tables[RECORDS], COLUMNS)
    return Source(folder, tables, records, read_config(folder))


def refuse_schemas(sources: Sequence[Source]) -> None:
    """Refuse records that were written by versions with different columns."""
    found = {
        str(schema): source.folder
        for source in reversed(sources)
        for schema in source.records["schema"].unique()
    }
    if len(found) > 1:
        each = ", ".join(f"{folder} has schema {schema}" for schema, folder in found.items())
        raise UsageError(
            f"{each}; run the sweeps' commands again with this version, which writes their records "
            "in its own, or merge these folders separately"
        )


def refuse_unlike(sources: Sequence[Source], mix: bool) -> None:
    """Refuse records that are not comparable: without ``mix`` rows of another GPU, torch, network
    or data.

    Rows that agree on the axes of a column of `COMPARABLE` must agree on the column; unknown values
    are not compared.
    """
    import pandas as pd

    parts = [s.records.assign(folder=str(s.folder)) for s in sources]
    rows = pd.concat(parts, ignore_index=True)
    differing = []
    for name, owners in COMPARABLE.items() if not mix else ():
        known = rows[~find_unknown(rows, name)]
        for _, alike in known.groupby(number_groups(known, owners)):
            values = alike.groupby(name)["folder"].first()
            if len(values) > 1:
                each = (f"{value or 'none'} in {folder}" for value, folder in values.items())
                differing.append(f"{name} is {', '.join(each)}")
    if differing:
        raise UsageError(
            f"the records would not be comparable: {'; '.join(dict.fromkeys(differing))}; merge "
            "what is comparable into a folder each, or join all with --mix"
        )


def claim(out: Path) -> None:
    """Mark a folder as a joined one, before anything else is written there. Raises UsageError: it
    holds a sweep that was not joined there. Raises OSError: it cannot be written."""
    if (out / JOINED).exists():
        return
    if there := [name for name in (*TABLES, CONFIG) if (out / name).exists()]:
        raise UsageError(
            f"--out {out}: has a {there[0]} that bench.merge did not write; choose another --out"
        )
    out.mkdir(parents=True, exist_ok=True)
    write_plans(out, {})


def join_records(sources: Sequence[Source]) -> tuple[pa.Table, list[int]]:
    """Return all records as text, each once, in the order in which they ended, and the number of
    the source of each: the first that has it. Raises UsageError: folders differ in a record."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    tables = [source.tables[RECORDS] for source in sources]
    table = pa.concat_tables(tables).combine_chunks()
    owners = np.repeat(np.arange(len(tables)), [len(t) for t in tables])
    places: dict[str, int] = {}
    ids = table["record_id"].to_pylist()
    first = np.array([places.setdefault(name, at) for at, name in enumerate(ids)], dtype=np.int64)
    for name in table.column_names:
        cells = table[name]
        unlike = pc.not_equal(cells, cells.take(pa.array(first)))
        if name not in _PLACED and pc.any(unlike).as_py():
            at = unlike.to_pylist().index(True)
            here, there = (sources[owners[row]].folder for row in (at, first[at]))
            raise UsageError(
                f"{here} and {there} differ in {name!r} of record {ids[at]}: one was edited; leave "
                "it out, or choose another --out"
            )
    kept = np.flatnonzero(first == np.arange(len(first)))
    single = table.take(pa.array(kept))
    order = pc.sort_indices(single, sort_keys=[(name, "ascending") for name in _ORDER])
    return single.take(order), [int(owners[kept[row]]) for row in order.to_pylist()]


def join_beside(
    name: str, sources: Sequence[Source], records: pa.Table, owners: Sequence[int]
) -> pa.Table | None:
    """Return the rows of another table for ``records``, each record's from its own source; None if
    no source has such a table."""
    import pyarrow as pa
    import pyarrow.compute as pc

    numbers = pa.array(owners, pa.int64())
    parts = []
    for number, source in enumerate(sources):
        if name in source.tables:
            table = source.tables[name]
            own = records["record_id"].filter(pc.equal(numbers, number)).combine_chunks()
            parts.append(table.filter(pc.is_in(table["record_id"], value_set=own)))
    if not parts:
        return None
    table = pa.concat_tables(parts)
    at = pc.index_in(table["record_id"], value_set=records["record_id"].combine_chunks())
    keyed = table.append_column("at", at).append_column("line", pa.array(range(len(table))))
    order = pc.sort_indices(keyed, sort_keys=[("at", "ascending"), ("line", "ascending")])
    return table.take(order)


def copy_logs(
    out: Path, sources: Sequence[Source], records: pa.Table, owners: Sequence[int]
) -> pa.Table:
    """Copy the logs and traces of ``records`` under unique names, because folders may have files of
    the same name. Return the records with the new names. What ``out`` has already stays. Raises
    OSError: a file cannot be copied."""
    import pyarrow as pa

    logs = records["log"].to_pylist()
    identities = records["record_id"].to_pylist()
    for row, (number, identity) in enumerate(zip(owners, identities, strict=True)):
        folder, name = sources[number].folder, Path(logs[row]).name
        if not name or folder == out:
            continue
        whole = name if name.startswith(identity) else f"{identity}-{name}"
        for kind, suffix in ((LOGS, Path(name).suffix), (TRACES, ".json.gz")):
            file = (folder / kind / name).with_suffix(suffix)
            to = (out / kind / whole).with_suffix(suffix)
            if file.is_file() and not (to.is_file() and to.stat().st_size == file.stat().st_size):
                to.parent.mkdir(exist_ok=True)
                temporary = to.with_name(f".{to.name}")
                shutil.copyfile(file, temporary)
                temporary.replace(to)
        logs[row] = f"{LOGS}/{whole}"
    at = records.column_names.index("log")
    return records.set_column(at, "log", pa.array(logs, pa.string()))


def join_configs(configs: Iterable[Mapping[str, Any]], planned: Iterable[Plan]) -> dict[str, Any]:
    """Return one configuration with the commands of all, and the cases of all and of ``planned``,
    in a fixed order."""
    known = [config for config in configs if config]
    plans = [*map(Plan.of, known), *planned]
    presets = {str(c["preset"]) for c in known if "preset" in c}
    commands = {line for c in known for line in str(c.get("command", "")).splitlines()}
    cases = {case for plan in plans for case in plan.list_cases() or ()}
    searches = [c["search"] for c in known if c.get("search")]
    halvings = {json.dumps(c["halving"]): c["halving"] for c in known if c.get("halving")}
    return {
        "command": "\n".join(sorted(commands)),
        "preset": presets.pop() if len(presets) == 1 else SEVERAL,
        "repeats": max((plan.repeats for plan in plans), default=1),
        **spell_cases(sorted(cases, key=lambda case: [*map(_rank, list_values(case))])),
        "environment": _join(known, "environment"),
        "datasets": _join(known, "datasets"),
        **({"search": min(searches, key=json.dumps)} if searches else {}),
        # trials of different searches were not compared with each other
        **({"halving": next(iter(halvings.values()))} if len(halvings) == 1 else {}),
        MERGED: True,
    }


def _rank(value: Value) -> tuple[float, str]:
    """Return the sort key of a value of an axis: numbers by their size."""
    text = format_value(value)
    try:
        return float(text), ""
    except ValueError:
        return 0.0, text


def _join(configs: Sequence[Mapping[str, Any]], part: str) -> dict[str, Any]:
    """Join the entries of a part by name; where they differ, always take the same one."""
    parts = [config[part] for config in configs if isinstance(config.get(part), dict)]
    names = sorted({name for told in parts for name in told})
    return {n: min((told[n] for told in parts if n in told), key=json.dumps) for n in names}


def join_plans(sources: Sequence[Source]) -> dict[str, Plan]:
    """Return the plan of each joined folder; of a source, the one that it has now."""
    plans = dict(chain.from_iterable(read_plans(s.folder).items() for s in reversed(sources)))
    own = ((s.folder, read_own_plan(s.folder, s.config)) for s in sources)
    return plans | {str(folder.resolve()): plan for folder, plan in own if plan}


def write_union(out: Path, sources: Sequence[Source]) -> Source:
    """Join ``sources`` into ``out``, whose own rows are the last of them if it has any.

    Every file is replaced as a whole, the records last: an interrupt leaves the records as they
    were, and the same command resumes. Raises UsageError: folders differ in a cell of the same
    record. Raises OSError: something cannot be written.
    """
    records, owners = join_records(sources)
    plans = join_plans(sources)
    write_plans(out, plans)
    records = copy_logs(out, sources, records, owners)
    config = join_configs((source.config for source in sources), plans.values())
    replace_file(out / CONFIG, spell_config(config))
    tables = {RECORDS: records}
    for name in TABLES:
        if name != RECORDS and (table := join_beside(name, sources, records, owners)) is not None:
            write_table(out / name, table)
            tables[name] = table
    write_table(out / RECORDS, records)
    return Source(out, tables, type_table(out / RECORDS, records, COLUMNS), config)
