"""Measure the accuracy contract over thousands of random problems.

    python -m tests.accuracy [--cases N] [--seed S] [--json]

Half of the problems are nearly parallel. Every number is against the exact oracle in
``naive.py``; the last table compares with scipy.linalg.expm on the dense matrix.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.linalg
from rich.console import Console
from rich.progress import track
from rich.table import Table

from lowrank_expm import LowRankSkew, LowRankUnitary

from . import generators as gen
from . import naive

ROUTES = ("auto", "gram", "qr")
COLUMNS = 2
Record = dict[str, Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class Problem:
    """U, V and B with what every route is measured against."""

    kind: str
    U: gen.Array
    V: gen.Array
    B: gen.Array

    @property
    def u(self) -> float:
        return gen.unit(self.U.dtype)


def draw(seed: int, index: int) -> Problem:
    """Problem number `index`: dtypes in turn, every second round nearly parallel."""
    rng = np.random.default_rng([seed, index])
    dtype = gen.DTYPES[index % 4]
    n, r = int(rng.integers(12, 25)), int(rng.integers(1, 4))
    names = sorted(set(gen.MAKERS) - {"parallel_at_random", "both_zero"})
    kind = "parallel_at_random" if index // 4 % 2 else str(rng.choice(names))
    U, V = gen.MAKERS[kind](rng, n, r, dtype)
    return Problem(kind, U, V, gen.normal(rng, (n, COLUMNS), dtype))


def measure(problem: Problem) -> list[Record]:
    """One record a route; "gram" by name may refuse, and has none then."""
    U, V, B = problem.U, problem.V, problem.B
    exact = naive.exact_skew(U, V, B, digits=30)
    scale = max(1.0, gen.rho(U, V))
    operators = [_operator(U, V, route) for route in ROUTES]
    return [
        _measure_route(problem, exact, scale, route, Q)
        for route, Q in zip(ROUTES, operators, strict=True)
        if Q is not None
    ]


def _operator(U: gen.Array, V: gen.Array, route: str) -> LowRankUnitary | None:
    try:
        return LowRankSkew(U, V, method=route).expm()
    except ValueError:
        if route != "gram":
            raise
        return None


def _measure_route(
    problem: Problem, exact: naive.Exact, scale: float, route: str, Q: LowRankUnitary
) -> Record:
    U, B, u = problem.U, problem.B, problem.u
    Y = Q @ B
    error = float((exact.distance(Y) / np.linalg.norm(B, axis=0)).max())
    defect = float(naive.defects(Q).item())
    certificate = Q.certificate
    return {
        "dtype": U.dtype.name,
        "route": route,
        "chosen": str(certificate.route),
        "error": error / (u * scale),
        "defect": defect / u,
        "defect_m": defect / (u * np.sqrt(2 * U.shape[1])),
        "drift": float(naive.norm_drifts(Y, B).max()) / u,
        "defect_bound": float(certificate.defect_bound) / u,
        "error_bound": float(certificate.error_bound) / (u * scale),
    }


def summarise(records: list[Record]) -> list[Row]:
    """One row a dtype and route."""
    groups = [(dtype, route) for dtype in gen.DTYPES for route in ROUTES]
    return [
        _summary(dtype, route, chosen)
        for dtype, route in groups
        if (chosen := [r for r in records if (r["dtype"], r["route"]) == (dtype, route)])
    ]


def _summary(dtype: str, route: str, records: list[Record]) -> Row:
    def column(name: str) -> Any:
        return np.array([record[name] for record in records])

    defect, bound = column("defect"), column("defect_bound")
    error, error_bound = column("error"), column("error_bound")
    large = defect > 20
    return {
        "dtype": dtype,
        "route": route,
        "cases": len(records),
        "by qr": float(np.mean([record["chosen"] == "qr" for record in records])),
        "error worst": float(error.max()),
        "error median": float(np.median(error)),
        "defect worst": float(defect.max()),
        "defect/√m worst": float(column("defect_m").max()),
        "drift worst": float(column("drift").max()),
        "defect bound holds": float(np.mean(bound >= defect)),
        "bound/defect median": _median(bound[large] / defect[large]),
        "error bound holds": float(np.mean(error_bound >= error)),
        "bound/error median": _median((error_bound / np.maximum(error, 0.05))[error > 0]),
    }


def _median(values: gen.Array) -> float | None:
    return float(np.median(values)) if values.size else None


def _plain(row: Row) -> Row:
    """JSON has no NaN and no infinity: null stands for both."""
    return {
        key: None if isinstance(value, float) and not np.isfinite(value) else value
        for key, value in row.items()
    }


PairMaker = Callable[[np.random.Generator], gen.Pair]
CASES: dict[str, PairMaker] = {
    "generic": lambda rng: gen.generic(rng, 24, 3, "float64"),
    "large": lambda rng: gen.with_norm(rng, 24, 3, "float64", 2e2),
    "huge": lambda rng: gen.with_norm(rng, 24, 3, "float64", 9e3),
    "columns scaled by 1e±8": lambda rng: gen.scaled_columns(rng, 24, 3, "float64"),
    "U rank-deficient": lambda rng: gen.rank_deficient(rng, 24, 3, "float64"),
    "nearly parallel": lambda rng: gen.nearly_parallel(rng, 24, 3, "float64", 1e-3, 5.0),
    "largest angle": lambda rng: gen.with_norm(rng, 24, 3, "float64", 1e13),
}


def compare(seed: int, repeats: int = 9) -> list[Row]:
    """Median relative error and defect of every route and of SciPy on the named cases."""
    return [
        _compare_case(name, make, [np.random.default_rng([seed, i]) for i in range(repeats)])
        for name, make in CASES.items()
    ]


def _compare_case(name: str, make: PairMaker, rngs: list[np.random.Generator]) -> Row:
    results = [_compare_one(*make(rng), rng.standard_normal((24, COLUMNS))) for rng in rngs]
    medians = {key: float(np.median([result[key] for result in results])) for key in results[0]}
    return {"case": name, **medians}


def _compare_one(U: gen.Array, V: gen.Array, B: gen.Array) -> Row:
    exact = naive.exact_skew(U, V, B)
    size = np.linalg.norm(B, axis=0)
    row = {"‖S‖": gen.theta(U, V), "‖U‖‖V‖": gen.rho(U, V)}
    for route in ("gram", "qr", "auto"):
        Q = _operator(U, V, route)
        if Q is None:
            row[f"error {route}"] = row[f"defect {route}"] = np.nan
            continue
        row[f"error {route}"] = float((exact.distance(Q @ B) / size).max())
        row[f"defect {route}"] = float(naive.defects(Q).item())
    dense = scipy.linalg.expm(U @ V.T - V @ U.T)
    row["error scipy"] = float((exact.distance(dense @ B) / size).max())
    row["defect scipy"] = naive.dense_defect_mp(dense)
    return row


def table(title: str, rows: list[Row], form: Callable[[Any], str]) -> Table:
    result = Table(title=title, title_justify="left")
    for name in rows[0]:
        result.add_column(name, justify="left" if name in ("dtype", "route", "case") else "right")
    for row in rows:
        result.add_row(*(form(value) for value in row.values()))
    return result


def _decimal(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _scientific(value: Any) -> str:
    return f"{value:.0e}" if isinstance(value, float) else str(value)


def _progress(indices: Iterable[int], total: int) -> Iterator[int]:
    console = Console(stderr=True)
    yield from track(indices, "measuring", total, console=console, disable=not console.is_terminal)


def markdown(rows: list[Row]) -> str:
    """The comparison as a table for the README."""
    methods = ("gram", "qr", "auto", "scipy")
    lines = [
        "| case | ‖S‖ | relative error: gram, qr, auto, scipy.linalg.expm "
        "| defect ‖QᵀQ − I‖₂: gram, qr, auto, scipy.linalg.expm |",
        "|---|---|---|---|",
    ]
    for row in rows:
        errors, defects = (
            ", ".join(f"{row[f'{kind} {method}']:.0e}" for method in methods)
            for kind in ("error", "defect")
        )
        lines.append(f"| {row['case']} | {row['‖S‖']:.0e} | {errors} | {defects} |")
    return "\n".join(lines)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=8000, help="problems, over all four dtypes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = _arguments(argv)
    indices = _progress(range(options.cases), options.cases)
    records = [record for i in indices for record in measure(draw(options.seed, i))]
    rows, comparison = summarise(records), compare(options.seed)
    if options.json:
        tables = {"contract": rows, "comparison": comparison}
        plain = {name: [_plain(row) for row in part] for name, part in tables.items()}
        print(json.dumps(plain, ensure_ascii=False))
        return 0
    terminal = sys.stdout.isatty()
    console = Console(width=None if terminal else 200)
    units = "errors in u·max(1, ρ), defects and drifts in u"
    console.print(table(f"Accuracy contract ({units})", rows, _decimal))
    console.print(markdown(comparison), soft_wrap=True, markup=False, highlight=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
