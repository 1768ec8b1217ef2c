"""Rows of a data file, the same text as in the language scripts, which also run without this folder."""

import csv
import json
import os
from pathlib import Path


def read_file(name: str, parse_float) -> list:
    """The rows of hub:NAME:CONFIG:SPLIT or of a data file. Those of JSON lines are text."""
    if name.startswith("hub:"):
        import datasets

        path, *config = name.removeprefix("hub:").split(":", 2)
        split = config.pop() if config else "train"
        return datasets.load_dataset(path, *config, split=split).to_list()
    kind = Path(name).suffix.lower()
    if kind in (".parquet", ".pq"):
        import pyarrow.parquet

        return pyarrow.parquet.read_table(name).to_pylist()
    if kind == ".csv":
        csv.field_size_limit(2**31 - 1)
        with open(name, encoding="utf-8-sig", newline="") as file:
            names, *rows = [*csv.reader(file)] or [[]]
        # A row of another length stays a list, which read_rows refuses.
        return [dict(zip(names, row)) if len(row) == len(names) else row for row in rows if row]
    # Bytes that are not UTF-8 become half surrogate pairs, which read_rows looks for.
    text = Path(name).read_text(encoding="utf-8-sig", errors="surrogateescape")
    if kind in (".json", ".jsonl") and text.lstrip().startswith("["):
        return json.loads(text, parse_float=parse_float)
    return text.split("\n")


def read_rows(name: str, parse_float=float):
    """Yield a place, such as "train.jsonl, line 3", and the dict there for each row of a data file.

    .jsonl, .json (also one array), .parquet, .csv, or hub:NAME:CONFIG:SPLIT of the Hugging Face
    Hub. ValueError of one sentence if something cannot be read.
    """
    if not str(name).startswith("hub:") and not os.path.isfile(name):
        raise ValueError(f"{name}: no such file; of the Hugging Face Hub: hub:NAME:CONFIG:SPLIT")
    try:
        rows = read_file(str(name), parse_float)
    except ImportError as error:
        raise ValueError(f"{name}: {error}; pip install datasets") from None
    except Exception as error:  # of the disk or the network, or whatever pyarrow and datasets raise
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ValueError(f"{name}: cannot be read ({reason:.300})") from None
    for number, row in enumerate(rows, start=1):
        place = f"{name}, {'line' if isinstance(row, str) else 'row'} {number}"
        if isinstance(row, str) and not row.strip():
            continue
        try:
            if isinstance(row, str):
                row.encode()
                row = json.loads(row.rstrip(), parse_float=parse_float)
            json.dumps(row, ensure_ascii=False, default=str).encode()
        except UnicodeError:
            kinds = "of a .jsonl, .json, .csv or .parquet file"
            raise ValueError(f"{place}: not UTF-8 text {kinds}, or half a surrogate pair") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{place}: not JSON, {str(error).replace('line 1 ', '')}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{place}: found {row!r:.60}, expected names and values")
        yield place, row
