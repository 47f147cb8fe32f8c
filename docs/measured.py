"""Tables and pictures of the measured pages, made from the JSON files in ``docs/data``.

The files are what these commands print, each measured once and kept:

    lowrank-expm bench --json                > docs/data/speed.json
    python -m tests.accuracy --json          > docs/data/accuracy.json
    python -m tests.derivative_accuracy --json > docs/data/derivatives.json
    python -m lowrank_expm.experiments --threads 1 --out docs/data/attention …

where the last stands for the commands in ``docs/guide/attention.md``; their JSON files are kept.

Pictures come in two versions, dark on light and light on dark, without a background of their own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lowrank_expm.experiments.pictures import KINDS, PICTURES

Data = Any
# Colours of Okabe and Ito, as in `bench.plot`; "text" is the page's own.
OURS, PLAIN = "lowrank_expm", "plain NumPy Gram form"
STYLES = {
    OURS: ("text", "o", "-"),
    "read U, V, b twice, write y once": ("text", "", "--"),
    PLAIN: ("#3b8fc4", "s", "-"),
    "QR + scipy.linalg.expm": ("#D55E00", "^", "-"),
    "Arnoldi to 2r + 1": ("#009E73", "v", "-"),
    "scipy.sparse.linalg.expm_multiply": ("#CC79A7", "D", "-"),
    "scipy.sparse.linalg.funm_multiply_krylov": ("#E69F00", "P", "-"),
    "scipy.linalg.expm": ("#56B4E9", "X", "-"),
}
ROUTES = {
    "auto": ("lowrank_expm, auto", "text", "o"),
    "gram": ("lowrank_expm, gram", "#3b8fc4", "s"),
    "qr": ("lowrank_expm, qr", "#009E73", "v"),
    "scipy": ("scipy.linalg.expm", "#D55E00", "X"),
}
MODES = {"light": "#1a1a1a", "dark": "#e6e6e6"}
UNIT = 2.0**-53


def write(data: Path, out: Path) -> None:
    """All of them."""
    out.mkdir(exist_ok=True)
    speed, accuracy, derivatives = (
        json.loads((data / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("speed", "accuracy", "derivatives")
    )
    pages = {
        "headline": headline(speed),
        "machine": machine(speed),
        "targets": targets(speed),
        "studies": "\n\n".join(map(study, speed["sections"][1:])),
        "contract": contract(accuracy["contract"]),
        "comparison": comparison(accuracy["comparison"]),
        "derivatives": derivative_errors(derivatives),
        "constants": constants(accuracy["contract"], derivatives),
    }
    for name, text in pages.items():
        _update(out / f"{name}.md", (text + "\n").encode())
    draw(out / "time-rows", lambda axes, ink: times(axes, ink, section(speed, "n")), (7.5, 5.2))
    draw(out / "time-r", lambda axes, ink: scaling(axes, ink, section(speed, "r"), "r"), (7.5, 3.6))
    draw(out / "time-k", lambda axes, ink: scaling(axes, ink, section(speed, "k"), "k"), (7.5, 3.6))
    for what, label in (("defect", "defect ‖QᵀQ − I‖₂"), ("error", "relative error of exp(tS) B")):
        draw(
            out / f"{what}s",
            lambda axes, ink, what=what, label=label: cases(
                axes, ink, accuracy["comparison"], what, label
            ),
            (7.5, 3.8),
        )
    attention(data / "attention", out)


def attention(data: Path, out: Path) -> None:
    """The studies of orthogonal attention."""
    found = {
        path.stem: json.loads(path.read_text(encoding="utf-8")) for path in data.glob("*.json")
    }
    tables = {
        "rank": by_depth(found["rank"], lambda row: f"{row['effective rank']:.1f}"),
        "conditioning": by_depth(found["conditioning"], _condition),
        "training": training(found["training"]),
        "alpha": first_alphas(found["alpha"]),
    }
    for name, text in tables.items():
        _update(out / f"attention-{name}.md", (text + "\n").encode())
    for name, study in found.items():
        draw_figure(
            out / f"attention-{name}",
            lambda figure, ink, study=study: PICTURES[study["name"]](
                figure, study["rows"], study["details"]
            ),
            (7.5, 3.6),
        )


def _update(path: Path, content: bytes) -> None:
    """Write a file only where that changes it, so that a second build has nothing to do."""
    if not path.exists() or path.read_bytes() != content:
        path.write_bytes(content)


# ------------------------------------------------------------------------------------ tables


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A Markdown table whose first columns are aligned to the left."""
    rule = ["---"] * left + ["--:"] * (len(columns) - left)
    return "\n".join("| " + " | ".join(row) + " |" for row in (columns, rule, *rows))


def section(speed: Data, key: str) -> Data:
    """A study by its key."""
    return next(s for s in speed["sections"] if s["key"] == key)


def duration(seconds: float) -> str:
    """Three digits and a unit."""
    unit, factor = next(
        (u, f)
        for u, f in (("s", 1), ("ms", 1e3), ("µs", 1e6), ("ns", 1e9))
        if seconds * f >= 0.9995 or u == "ns"
    )
    return f"{seconds * factor:#.3g}".rstrip(".") + f" {unit}"


def headline(speed: Data) -> str:
    """The numbers of the start page."""
    found = {t["name"]: t for t in section(speed, "n")["timings"] if t["size"] == 1_000_000}
    krylov, qr, plain = (
        f"{found[name]['ratio']:.0f} times"
        for name in ("scipy.sparse.linalg.expm_multiply", "QR + scipy.linalg.expm", PLAIN)
    )
    return (
        f"For a million rows and r = 8 that takes {duration(found[OURS]['seconds'])} on "
        f"{speed['machine']['threads']} cores. `scipy.sparse.linalg.expm_multiply` takes {krylov} "
        f"as long, QR with `scipy.linalg.expm` {qr}, the same mathematics in plain NumPy {plain} "
        "({doc}`performance`)."
    )


def _code(name: str) -> str:
    """A contender's name, SciPy's functions as code."""
    return " ".join(f"`{word}`" if "scipy." in word else word for word in name.split(" "))


def machine(speed: Data) -> str:
    """What it was measured on."""
    return table(("", ""), [(name, str(value)) for name, value in speed["machine"].items()], 2)


def targets(speed: Data) -> str:
    """What was aimed at and what was measured."""
    rows = [
        (
            _code(t["what"]),
            f"{t['value']:.3g}\u00a0{t['unit']}",
            f"{t['sense']} {t['bound']:.3g}\u00a0{t['unit']}",
            "met" if t["met"] else "**missed**",
        )
        for s in speed["sections"]
        for t in s["targets"]
        if not t["what"].startswith("defect")
    ]
    return table(("", "measured", "aim", ""), rows)


def study(s: Data) -> str:
    """All times of one study, under its title."""
    rows, case = [], None
    for t in s["timings"]:
        quartiles = (
            f"{duration(t['low'])} – {duration(t['high'])}" if t["samples"] > 1 else "one sample"
        )
        rate = f"{t['rate']:.3g} {t['unit']}" if t["rate"] is not None else ""
        rows.append(
            (
                "" if t["case"] == case else t["case"],
                _code(t["name"]),
                duration(t["seconds"]),
                quartiles,
                f"{t['ratio']:.2f}",
                rate,
            )
        )
        case = t["case"]
    head = ("", "", "median", "quartiles", "÷ ours", "rate")
    notes = "\n\n".join(f"*{note}.*" for note in s["notes"])
    return f"### {s['title'][0].upper()}{s['title'][1:]}\n\n{table(head, rows, 2)}\n\n{notes}"


def contract(rows: Data) -> str:
    """Worst errors and how good the bounds are, by dtype and route."""
    columns = {
        "dtype": "dtype",
        "route": "route",
        "cases": "problems",
        "error worst": "worst error",
        "defect/√m worst": "worst defect / √m",
        "drift worst": "worst drift",
        "defect bound holds": "defect bound holds",
        "error bound holds": "error bound holds",
        "bound/error median": "error bound / error",
    }
    body = [[_cell(name, row[name]) for name in columns] for row in rows]
    return table(list(columns.values()), body, 2)


def _cell(name: str, value: Any) -> str:
    """A number of the accuracy tables."""
    if value is None:
        return "unbounded" if "worst" in name else "–"
    if "holds" in name:
        return f"{100 * value:.4g}\u00a0%"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def comparison(rows: Data) -> str:
    """Errors and defects of the named cases, beside SciPy's."""
    head = ["case", "‖S‖", *(f"{what}, {r}" for what in ("error", "defect") for r in ROUTES)]
    body = [
        [
            row["case"],
            f"{row['‖S‖']:.0e}",
            *(_tiny(row[f"{what} {r}"]) for what in ("error", "defect") for r in ROUTES),
        ]
        for row in rows
    ]
    return table(head, body)


def _tiny(value: float | None) -> str:
    """One digit and an exponent."""
    return "refused" if value is None else f"{value:.0e}"


def derivative_errors(rows: Data) -> str:
    """Worst errors of the derivatives, by dtype and direction."""
    names = list(rows[0])
    return table(names, [[_cell("", row[name]) for name in names] for row in rows])


def constants(rows: Data, derivatives: Data) -> str:
    """The constants of the error analysis, in double precision."""
    found = {row["route"]: row for row in rows if row["dtype"] == "float64"}
    worst = max(v for row in derivatives for v in row.values() if isinstance(v, float))
    body = [
        (
            what,
            *(
                f"{found[route][name]:.3g}" if found[route][name] is not None else "unbounded"
                for route in ("auto", "qr")
            ),
            bound,
        )
        for what, name, bound in (
            ("error of exp(tS)B, in u·max(1, ρ)·‖B‖", "error worst", "40"),
            ("orthogonality defect, in √m·u", "defect/√m worst", "80 (auto), 32 (qr)"),
            ("norm drift, in u", "drift worst", "80 √m (auto), 32 √m (qr)"),
        )
    ]
    body.append(
        ("derivatives of all four dtypes, relative, in u·max(1, ρ)", f"{worst:.3g}", "", "1,000")
    )
    return table(("", "auto", "qr", "promised"), body)


def by_depth(study: Data, cell: Callable[[Data], str]) -> str:
    """A row for each kind of model, a column for each depth."""
    depths = sorted({row["depth"] for row in study["rows"]})
    cells = {(row["kind"], row["depth"]): cell(row) for row in study["rows"]}
    body = [(kind, *(cells[kind, depth] for depth in depths)) for kind in KINDS]
    return table(("depth", *map(str, depths)), body)


def _condition(row: Data) -> str:
    """A condition number."""
    value = row["condition number"]
    return _rounded(value) if value < 1e15 else "singular"


def _rounded(value: float) -> str:
    """Two digits."""
    if value < 100:
        return f"{value:.2g}"
    return f"{value:.0f}" if value < 1000 else f"{value:.0e}".replace("e+", "e")


def training(study: Data) -> str:
    """Test accuracy with its spread, by depth and kind."""
    rows = {(row["depth"], row["kind"]): row for row in study["rows"]}
    body = []
    for depth in sorted({depth for depth, _ in rows}):
        mine = [rows[depth, kind] for kind in KINDS]
        spread = [
            f"{r['test accuracy']:.3f} ({r['lowest']:.3f} to {r['highest']:.3f})" for r in mine
        ]
        body.append((str(depth), f"{mine[0]['parameters']:,}", *spread))
    return table(("depth", "parameters", *KINDS), body, 2)


def first_alphas(study: Data) -> str:
    """What the first alpha and its rate trade."""
    head = ("first α · √L", "rate of alpha", "condition number", "after a quarter", "at the end")
    body = [
        (
            f"{row['alpha·√depth']:g}",
            format(row["alpha's rate"], "g"),
            _rounded(row["condition at first"]),
            f"{row['accuracy after a quarter']:.3f}",
            f"{row['test accuracy']:.3f}",
            f"{row['training loss']:.1g}",
        )
        for row in study["rows"]
    ]
    return table((*head, "training loss"), body, 2)


# ---------------------------------------------------------------------------------- pictures


def draw(stem: Path, paint: Callable[[Axes, str], None], size: tuple[float, float]) -> None:
    """A picture of one diagram in both modes, as SVG."""
    draw_figure(stem, lambda figure, ink: paint(figure.add_subplot(), ink), size)


def draw_figure(
    stem: Path, paint: Callable[[Figure, str], None], size: tuple[float, float]
) -> None:
    """A picture in both modes, as SVG."""
    for mode, ink in MODES.items():
        with matplotlib.rc_context(_settings(ink)):
            figure = Figure(figsize=size, layout="constrained")
            paint(figure, ink)
            figure.savefig(
                stem.with_name(f"{stem.name}-{mode}.svg"), transparent=True, metadata={"Date": None}
            )


def _settings(ink: str) -> dict[str, Any]:
    """Lines and text in the page's colour; the same file for the same numbers."""
    coloured = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    return {
        **dict.fromkeys(coloured, ink),
        "font.size": 10,
        "svg.hashsalt": "lowrank_expm",
        "grid.color": "#808080",
        "grid.alpha": 0.35,
        "legend.frameon": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }


def times(axes: Axes, ink: str, study: Data) -> None:
    """The time of one call against n, beside the peers."""
    for name, style in STYLES.items():
        _line(axes, [t for t in study["timings"] if t["name"] == name], name, style, ink)
    axes.set(xscale="log", yscale="log", xlabel="rows n", ylabel="time of one call (seconds)")
    axes.grid(which="major")
    axes.figure.legend(loc="outside lower center", ncols=2, fontsize=9)


def _line(axes: Axes, timings: Data, label: str, style: tuple[str, str, str], ink: str) -> None:
    """One contender's medians, with quartiles as bars."""
    colour, marker, line = style
    median = [t["seconds"] for t in timings]
    spread = [
        [max(0.0, t["seconds"] - t["low"]) for t in timings],
        [max(0.0, t["high"] - t["seconds"]) for t in timings],
    ]
    limit = bool(timings) and timings[0]["kind"] == "limit"
    axes.errorbar(
        [t["size"] for t in timings],
        median,
        yerr=spread,
        color=ink if colour == "text" else colour,
        marker=marker,
        linestyle=line,
        markersize=5,
        linewidth=2.2 if label == OURS else 1.3,
        capsize=2,
        label=f"limit: {label}" if limit else label,
    )


def scaling(axes: Axes, ink: str, study: Data, width: str) -> None:
    """The time of one call against r or k, beside the plain form and the machine's limit."""
    shown = {
        OURS: ("text", "o", "-"),
        PLAIN: ("#3b8fc4", "s", "-"),
        "limit: memory or products": ("text", "", "--"),
    }
    for name, style in shown.items():
        _line(
            axes,
            [t for t in study["timings"] if t["name"] == name],
            name.removeprefix("limit: "),
            style,
            ink,
        )
    axes.set_xscale("log", base=2)
    ticks = sorted({t["size"] for t in study["timings"]})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set(yscale="log", xlabel=f"columns {width}", ylabel="time of one call (seconds)")
    axes.grid(which="major")
    axes.legend(fontsize=9)


def cases(axes: Axes, ink: str, rows: Data, what: str, label: str) -> None:
    """The named cases as rows, the methods as marks, on a logarithmic axis."""
    for offset, (route, (name, colour, marker)) in enumerate(ROUTES.items()):
        found = [(i, row[f"{what} {route}"]) for i, row in enumerate(rows)]
        found = [(i, value) for i, value in found if value]
        axes.plot(
            [value for _, value in found],
            [-i + 0.24 - 0.16 * offset for i, _ in found],
            marker,
            color=ink if colour == "text" else colour,
            label=name,
            markersize=6,
        )
    axes.axvline(UNIT, color=ink, linestyle=":", linewidth=1)
    axes.annotate(
        "unit roundoff",
        (UNIT, 1),
        (0, 2),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha="center",
        fontsize=8,
    )
    axes.set_yticks([-i for i in range(len(rows))], [row["case"] for row in rows])
    axes.set(xscale="log", xlabel=label)
    axes.grid(axis="x", which="major")
    axes.figure.legend(loc="outside lower center", ncols=4, fontsize=9)
