"""What stands beside a sweep's records, as frames of pandas."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pandas as pd

from bench.results.store.reader import find_records
from bench.results.store.table import EPOCHS, STEPS, TABLES, WORK_FILE, read_columns


def read_frame(name: str, path: Path) -> pd.DataFrame:
    files = [file.with_name(name) for file in find_records(path)]
    parts = [pd.DataFrame(read_columns(file, TABLES[name])) for file in files if file.is_file()]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=[*TABLES[name]])


read_steps, read_epochs = partial(read_frame, STEPS), partial(read_frame, EPOCHS)
read_work = partial(read_frame, WORK_FILE)
