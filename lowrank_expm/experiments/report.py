"""A study's results: a table for a person, JSON for a program, a picture."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from .._version import __version__
from .pictures import PICTURES, Rows


@dataclass
class Result:
    """What a study found: rows with the same keys, notes, and what only the picture shows."""

    name: str
    title: str
    rows: Rows
    notes: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)

    def draw(self, figure: Any) -> None:
        """Draw the rows."""
        PICTURES[self.name](figure, self.rows, self.details)


def cell(value: Any) -> str:
    """A value as a person reads it."""
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def show(result: Result) -> None:
    """Print the table: by rich in a terminal, aligned text in a pipe."""
    columns = list(result.rows[0])
    rows = [[cell(row[c]) for c in columns] for row in result.rows]
    if sys.stdout.isatty():
        _show_rich(result.title, columns, rows)
    else:
        widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
        print(result.title)
        for row in (columns, *rows):
            print("  " + "  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)))
    for note in result.notes:
        print(note)
    print()


def _show_rich(title: str, columns: Sequence[str], rows: list[list[str]]) -> None:
    """A table in colour."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table)


def save(result: Result, folder: Path, settings: dict[str, Any]) -> None:
    """Write NAME.json and NAME.png."""
    folder.mkdir(parents=True, exist_ok=True)
    machine = {
        "lowrank_expm": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }
    content = {"machine": machine, "settings": settings, **asdict(result)}
    (folder / f"{result.name}.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    _picture(result, folder / f"{result.name}.png")


def _picture(result: Result, path: Path) -> None:
    """The picture as a file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    result.draw(figure)
    figure.savefig(path, dpi=150)
