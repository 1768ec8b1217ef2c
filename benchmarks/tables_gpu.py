"""The table of what benchmarks/gpu.py measured, for benchmarks/speed.md; make_tables.py draws it.

It takes `read`, which returns the rows of a CSV in benchmarks/results. Without a CSV of a GPU it is
the empty text.
"""

from pathlib import Path

from benchmarks.tables_control import Read, markdown, rows_of

RESULTS = Path(__file__).parent / "results"
HEADER = """GPU | part | run | decoding, tokens/s | of the limit, % | update, tokens/s
of the limit, % | environment steps/s | peak memory, GB | not run or failed"""


def number(text: str) -> str:
    """With three digits, or all of a large number."""
    if not text:
        return ""
    value = float(text)
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def percent(text: str) -> str:
    """A share."""
    return number(str(100 * float(text))) if text else ""


def conditions(rows: list[dict]) -> str:
    """What the rows of one GPU share: speed of a copy and of a product, versions."""
    moved = max(float(row["bytes_per_second"]) for row in rows)
    multiplied = max(float(row["flops_per_second"]) for row in rows)
    text = f"{rows[0]['device']}: a copy moves {moved / 1e12:.2g} TB/s, a product of bfloat16"
    text += f" matrices does {multiplied / 1e12:.0f} TFLOP/s"
    for name in ("torch", "transformers", "python", "commit"):
        text += f"; {name} " + ", ".join(sorted({row[name] for row in rows}))
    return f"{text}."


def gpu(read: Read) -> str:
    """Every run on every GPU, and what it ran with."""
    lines = []
    notes = []
    for path in sorted(RESULTS.glob("gpu_*.csv")):
        rows = rows_of(read, path.name)
        for row in rows:
            line = [row["device"], row["part"], row["run"]]
            for name in ("decode", "update"):
                line.append(number(row[f"{name}_tokens_per_second"]))
                line.append(percent(row[f"limit_share_{name}"]))
            line += [number(row["steps_per_second"]), number(row["peak_memory_gb"])]
            lines.append([*line, row["error"].replace("|", "/")])
        if rows:
            notes.append(conditions(rows))
    header = [cell.strip() for cell in HEADER.replace("\n", "|").split("|")]
    return "\n\n".join([markdown(header, lines), *notes]) if lines else ""


TABLES = {"gpu": gpu}
