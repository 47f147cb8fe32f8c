"""A study's results: a table for a person, JSON for a program, a picture."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from .._version import __version__

Rows = list[dict[str, Any]]


@dataclass
class Result:
    """What a study found: rows with the same keys, notes, and how to draw them."""

    name: str
    title: str
    rows: Rows
    notes: list[str] = field(default_factory=list)
    draw: Callable[[Any, Rows], None] | None = None
    details: dict[str, Any] = field(default_factory=dict)


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
    del content["draw"]
    (folder / f"{result.name}.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    if result.draw:
        _picture(result, folder / f"{result.name}.png")


def _picture(result: Result, path: Path) -> None:
    """Draw the rows."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    assert result.draw is not None
    result.draw(figure, result.rows)
    figure.savefig(path, dpi=150)


def lines(
    axes: Any, rows: Rows, x: str, y: str, by: str, colours: dict[str, str], **options: Any
) -> None:
    """A line for each value of `by`."""
    for name in dict.fromkeys(row[by] for row in rows):
        mine = [row for row in rows if row[by] == name and row[y] is not None]
        axes.plot(
            [row[x] for row in mine],
            [row[y] for row in mine],
            "o-",
            label=name,
            color=colours.get(name),
            markersize=4,
            **options,
        )
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
