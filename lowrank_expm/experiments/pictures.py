"""The studies' pictures, from a table's rows; drawn without torch, so that a site can, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Rows = list[dict[str, Any]]

KINDS = ("orthogonal", "softmax", "softmax, skip and norm")
COST_KINDS = ("orthogonal", "softmax, fused", "softmax, by its definition")
# The colours of Okabe and Ito.
COLOURS = dict(zip(KINDS, ("#0072B2", "#D55E00", "#009E73"), strict=True))
COST_COLOURS = dict(zip(COST_KINDS, ("#0072B2", "#D55E00", "#E69F00"), strict=True))


def lines(axes: Any, rows: Rows, x: str, y: str, by: str, colours: dict[str, str]) -> None:
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
        )
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def _orthogonality(figure: Any, rows: Rows, details: Any) -> None:
    """Defects layer by layer, in single and double precision."""
    axes = figure.subplots()
    for dtype, colour in (("float32", "#0072B2"), ("float64", "#D55E00")):
        mine = [row for row in rows if row["dtype"] == dtype]
        for key, line in (("defect / u at first", "--"), ("defect / u after training", "-")):
            what = key.removeprefix("defect / u ")
            values = [row[key] for row in mine]
            axes.plot(
                [row["layer"] for row in mine],
                values,
                "o" + line,
                color=colour,
                label=f"{dtype} {what}",
            )
    axes.set(xlabel="layer", ylabel="‖AᵀA − I‖₂ / u", ylim=(0, None))
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)


def _cost(figure: Any, rows: Rows, details: Any) -> None:
    """Time and memory against the number of tokens, all logarithmic."""
    for axes, y in zip(figure.subplots(1, 2), ("CPU seconds", "MiB"), strict=True):
        lines(axes, rows, "n", y, "kind", COST_COLOURS)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")


def _rank(figure: Any, rows: Rows, details: Any) -> None:
    """Rank against depth."""
    axes = figure.subplots()
    lines(axes, rows, "depth", "effective rank", "kind", COLOURS)
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, None)


def _conditioning(figure: Any, rows: Rows, details: Any) -> None:
    """Condition number against depth."""
    axes = figure.subplots()
    lines(axes, rows, "depth", "condition number", "kind", COLOURS)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")


def _training(figure: Any, rows: Rows, details: Any) -> None:
    """Accuracy against depth, and against the epoch at the largest depth; shaded is the spread."""
    deepest = max(row["depth"] for row in rows)
    left, right = figure.subplots(1, 2)
    lines(left, rows, "depth", "test accuracy", "kind", COLOURS)
    for kind in KINDS:
        mine = [row for row in rows if row["kind"] == kind]
        low, high = ([row[key] for row in mine] for key in ("lowest", "highest"))
        left.fill_between(
            [row["depth"] for row in mine], low, high, color=COLOURS[kind], alpha=0.15
        )
        runs = np.array(details["curves"][f"{kind}, depth {deepest}"])
        epochs = np.arange(1, runs.shape[1] + 1)
        right.plot(epochs, runs.mean(axis=0), color=COLOURS[kind])
        right.fill_between(
            epochs, runs.min(axis=0), runs.max(axis=0), color=COLOURS[kind], alpha=0.15
        )
    right.set(xlabel=f"epoch, at depth {deepest}", ylabel="test accuracy")
    right.grid(alpha=0.3)


def _alpha(figure: Any, rows: Rows, details: Any) -> None:
    """Conditioning beside learning, against the first alpha."""
    left, right = figure.subplots(1, 2)
    once = [row for row in rows if row["alpha's rate"] == rows[0]["alpha's rate"]]
    lines(left, once, "alpha·√depth", "condition at first", "alpha's rate", {})
    left.set(xscale="log", yscale="log")
    left.get_legend().remove()
    ends = []
    for key, when in (("accuracy after a quarter", "after a quarter"), ("test accuracy", "last")):
        for row in rows:
            name = "{}, rate × {:g}".format(when, row["alpha's rate"])
            ends.append({**row, "accuracy": row[key], "line": name})
    lines(right, ends, "alpha·√depth", "accuracy", "line", {})
    right.set(xscale="log")


PICTURES: dict[str, Callable[[Any, Rows, Any], None]] = {
    "orthogonality": _orthogonality,
    "cost": _cost,
    "rank": _rank,
    "conditioning": _conditioning,
    "training": _training,
    "alpha": _alpha,
}
