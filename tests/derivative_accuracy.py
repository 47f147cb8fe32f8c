"""Measure the derivatives over thousands of random and hard problems.

    python -m tests.derivative_accuracy [--cases N] [--seed S] [--json]

For every dtype and direction the worst relative error, in units of u·max(1, ρ), against the exact
oracle in ``naive.py``. The derivative in t is S exp(tS)B, whose S is a difference of products:
its size counts as ‖U‖‖V‖‖B‖ where it is smaller, which it is for nearly parallel U and V.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from lowrank_expm import derivatives

from . import generators as gen
from . import naive

MAKERS = {**gen.MAKERS, **gen.DERIVATIVE_MAKERS}
FORWARD = ("dU, dV, dB, dt", "dU", "dV", "dt")
REVERSE = ("Ū", "V̄", "B̄", "t̄")
Errors = dict[str, float]


class Problem:
    """U, V, B and t with a direction and a cotangent of their sizes."""

    def __init__(self, rng: np.random.Generator, kind: str, dtype: str, n: int, r: int) -> None:
        self.kind, self.dtype = kind, dtype
        self.U, self.V = MAKERS[kind](rng, n, r, dtype)
        self.t = float(rng.choice([1.0, 1.0, -1.0, 0.5]))
        self.B, self.dB, self.Y = (gen.normal(rng, (n, 2), dtype) for _ in range(3))
        self.exponents = naive.balance_pairs(self.U, self.V, self.U, self.V, exponents=True)
        scale = np.exp2(self.exponents)
        double = np.result_type(dtype, np.float64)
        self.dU = (gen.normal(rng, (n, r), double) / scale).astype(dtype)
        self.dV = (gen.normal(rng, (n, r), double) * scale).astype(dtype)
        self.dt = float(rng.standard_normal())

    @property
    def unit(self) -> float:
        """u·max(1, ρ)."""
        return gen.unit(self.dtype) * max(1.0, gen.rho(self.U, self.V, self.t))

    @property
    def speed(self) -> float:
        """‖U‖‖V‖‖B‖, the size of the derivative in t before cancellation."""
        return gen.rho(self.U, self.V) * float(np.linalg.norm(self.B))


def draw(seed: int, index: int) -> Problem:
    """Problem number `index`: dtypes in turn, then kinds in turn."""
    rng = np.random.default_rng([seed, index])
    kinds = sorted(MAKERS)
    kind = kinds[index // 4 % len(kinds)]
    r = int(rng.integers(1, 4))
    least = 2 * r if kind in ("repeated_angles", "multiples_of_pi") else 2
    return Problem(rng, kind, gen.DTYPES[index % 4], int(rng.integers(least, 11)), r)


def measure(p: Problem, forward: Iterable[str] = FORWARD) -> Errors:
    """The errors of jvp in some directions and of vjp, in u·max(1, ρ)."""
    return {**{name: _forward_error(p, name) for name in forward}, **_reverse_errors(p)}


def _forward_error(p: Problem, name: str) -> float:
    given = {"dU": p.dU, "dV": p.dV, "dB": p.dB}
    dU, dV, dB = (d if key in name else None for key, d in given.items())
    dt = p.dt if "dt" in name else 0.0
    _, dY = derivatives.jvp(p.U, p.V, p.B, dU, dV, dB, t=p.t, dt=dt)
    zeros = (np.zeros_like(a) for a in (p.U, p.V, p.B))
    filled = [z if d is None else d for d, z in zip((dU, dV, dB), zeros, strict=True)]
    _, exact = naive.exact_jvp(p.U, p.V, p.B, *filled, p.t, dt)
    size = float(np.linalg.norm(exact.round()))
    return _ratio(exact.distance(dY), max(size, abs(dt) * p.speed)) / p.unit


def _reverse_errors(p: Problem) -> Errors:
    _, pullback = derivatives.vjp(p.U, p.V, p.B, t=p.t)
    *bars, tbar = pullback(p.Y)
    exact = naive.exact_vjp(p.U, p.V, p.B, p.Y, p.t)
    errors = {}
    # Columns of Ū scale as those of V: undo that, so that no column hides behind another.
    for name, e, bar, c in zip(
        REVERSE, exact, bars, (-p.exponents, p.exponents, None), strict=False
    ):
        scale = 1.0 if c is None else np.exp2(c)
        size = float(np.linalg.norm(e.round() * scale))
        errors[name] = _ratio(e.distance(bar) * scale, size) / p.unit
    zero = [np.zeros_like(a) for a in (p.U, p.V, p.B)]
    _, moved = naive.exact_jvp(p.U, p.V, p.B, *zero, p.t, 1.0)
    difference = abs(tbar - float(np.vdot(p.Y.astype(complex), moved.round()).real))
    errors["t̄"] = _ratio(np.array([difference]), p.speed * float(np.linalg.norm(p.Y))) / p.unit
    return errors


def _ratio(distance: gen.Array, size: float) -> float:
    """‖distance‖ / size, where 0/0 is 0."""
    error = float(np.linalg.norm(distance))
    return error / size if size > 0 else (np.inf if error > 0 else 0.0)


def summarise(records: list[tuple[Problem, Errors]]) -> list[dict[str, Any]]:
    """One row a dtype: the worst of every direction, and the kind of the worst of all."""
    rows = []
    for dtype in gen.DTYPES:
        chosen = [(p, e) for p, e in records if p.dtype == dtype]
        if chosen:
            worst = {name: max(e[name] for _, e in chosen) for name in (*FORWARD, *REVERSE)}
            medians = [np.median([e[name] for _, e in chosen]) for name in (*FORWARD, *REVERSE)]
            kind = max(chosen, key=lambda record: max(record[1].values()))[0].kind
            row = {"dtype": dtype, "cases": len(chosen), **worst}
            rows.append({**row, "median": float(np.max(medians)), "worst in": kind})
    return rows


def _progress(indices: Iterable[int], total: int) -> Iterator[int]:
    console = Console(stderr=True)
    yield from track(indices, "measuring", total, console=console, disable=not console.is_terminal)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=4096, help="problems, over all four dtypes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    options = parser.parse_args(argv)
    indices = _progress(range(options.cases), options.cases)
    problems = (draw(options.seed, i) for i in indices)
    rows = summarise([(p, measure(p)) for p in problems])
    if options.json:
        print(json.dumps(rows, ensure_ascii=False))
        return 0
    title = "Worst relative errors of derivatives, in u·max(1, ρ)"
    table = Table(title=title, title_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="left" if name in ("dtype", "worst in") else "right")
    for row in rows:
        table.add_row(*(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()))
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
