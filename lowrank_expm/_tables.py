"""A benchmark's results as tables for a person: by rich in a terminal, as plain text in a pipe."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TextIO

from .bench import Results, Section, Target, Timing

_VERDICTS = {True: "met", False: "missed", None: "not judged"}
_COLUMNS = ("", "", "median", "quartiles", "/ ours", "rate", "differs by")
_TARGET_COLUMNS = ("target", "measured", "wanted", "")


@dataclass(frozen=True)
class Table:
    """Rows of text under a title; the first `left` columns are aligned to the left."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    left: int
    notes: tuple[str, ...] = ()


def tables(results: Results) -> list[Table]:
    """The machine, the studies, and the targets."""
    machine = [(name, _plain(value)) for name, value in results.machine.items()]
    targets = [_target_row(target) for section in results.sections for target in section.targets]
    return [
        Table("machine", ("", ""), machine, 2),
        *(_section_table(section) for section in results.sections),
        Table("targets", _TARGET_COLUMNS, targets, 1, (*_busy(results), _summary(results))),
    ]


def plain_text(results: Results) -> str:
    """All tables with their columns aligned."""
    return "\n\n".join(_plain_table(table) for table in tables(results))


def print_rich(results: Results, file: TextIO) -> None:
    """Print all tables to a terminal."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console(file=file, highlight=False)
    for table in tables(results):
        drawn = RichTable(title=Text(table.title), title_justify="left", box=None, pad_edge=False)
        for i, column in enumerate(table.columns):
            left = i < table.left
            drawn.add_column(Text(column), justify="left" if left else "right", no_wrap=not left)
        for row in table.rows:
            drawn.add_row(*(Text(cell, style=_style(cell)) for cell in row))
        console.print(drawn)
        for note in table.notes:
            console.print(escape(note))
        console.print()


def _style(cell: str) -> str:
    """Colour for a verdict."""
    return {"met": "green", "missed": "bold yellow"}.get(cell, "red" if "DIFFERS" in cell else "")


def _plain_table(table: Table) -> str:
    """A table as lines of text."""
    rows = [table.columns, *table.rows] if any(table.columns) else list(table.rows)
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(len(table.columns))]
    lines = [_plain_row(row, widths, table.left) for row in rows]
    return "\n".join([table.title, *(f"  {line}" for line in lines), *table.notes])


def _plain_row(row: Sequence[str], widths: Sequence[int], left: int) -> str:
    """One line."""
    cells = [
        cell.ljust(width) if i < left else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()


def _section_table(section: Section) -> Table:
    """The timings of a study; the case is named in its first row only."""
    rows, case = [], None
    for timing in section.timings:
        rows.append(("" if timing.case == case else timing.case, *_timing_cells(timing)))
        case = timing.case
    return Table(section.title, _COLUMNS, rows, 2, section.notes)


def _timing_cells(t: Timing) -> Iterable[str]:
    """One contender's row."""
    if not t.agrees:
        return t.name, "", "not counted", "", "", f"DIFFERS {t.difference:.1e}"
    return (
        t.name,
        duration(t.seconds),
        f"{duration(t.low)} - {duration(t.high)}" if t.samples > 1 else "one sample",
        f"{t.ratio:.2f}" if math.isfinite(t.ratio) else "",
        f"{t.rate:.3g} {t.unit}" if t.rate is not None else "",
        f"{t.difference:.0e}" if t.difference is not None else "",
    )


def _target_row(t: Target) -> tuple[str, ...]:
    """One target's row."""
    value = "" if math.isnan(t.value) else f"{t.value:.3g} {t.unit}"
    return t.what, value, f"{t.sense} {t.bound:.3g} {t.unit}", _VERDICTS[t.met]


def _busy(results: Results) -> Iterable[str]:
    """A warning if the machine had other work when the run began."""
    load = results.machine["load at the start"]
    if isinstance(load, float) and load > 0.5:
        yield f"The machine was busy with other programs (load {load:.1f}): repeat on a quiet one."


def _summary(results: Results) -> str:
    """The last line."""
    verdicts = [target.met for section in results.sections for target in section.targets]
    judged = [met for met in verdicts if met is not None]
    answers = "all answers agree" if results.agrees else "AN ANSWER DIFFERS from ours"
    return (
        f"{sum(judged)} of {len(judged)} targets met, {len(verdicts) - len(judged)} not judged; "
        f"{answers}; {results.seconds:.0f} s in total"
    )


def duration(seconds: float) -> str:
    """Three digits and a unit."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 0.9995:
            return f"{_three(seconds * factor)} {unit}"
    return f"{_three(seconds * 1e9)} ns"


def _three(value: float) -> str:
    """Three significant digits, without an exponent below a million."""
    value = float(f"{value:.3g}")  # first, as it may carry over to one digit more
    digits = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:.{digits}f}"


def _plain(value: object) -> str:
    """A number or text of the machine's description."""
    return f"{value:.2f}" if isinstance(value, float) else str(value)
