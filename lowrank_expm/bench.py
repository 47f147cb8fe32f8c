"""What ``lowrank-expm bench`` measures: this library, its peers and the machine's own limits.

A study is a list of cases; the contenders of a case take turns in one process, so that whatever
else the machine does falls on all of them alike. An answer is checked before its time counts.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from ._contest import Study

__all__ = ["Plan", "Results", "Section", "Target", "Timing", "plot", "run"]

Progress: TypeAlias = Callable[[str, int, int], object]
Kind: TypeAlias = Literal["ours", "peer", "limit", "part"]

# Contenders that the picture shows.
OURS = "lowrank_expm"
PLAIN, QR, ARNOLDI = "plain NumPy Gram form", "QR + scipy.linalg.expm", "Arnoldi to 2r + 1"
EXPM_MULTIPLY = "scipy.sparse.linalg.expm_multiply"
KRYLOV = "scipy.sparse.linalg.funm_multiply_krylov"
EXPM = "scipy.linalg.expm"
STREAM = "read U, V, b twice, write y once"


# -------------------------------------------------------------------------------- what to do


@dataclass(frozen=True)
class Plan:
    """Sizes and efforts of a benchmark.

    Parameters
    ----------
    rows : sequence of int
        The n of the study over n; ascending.
    judged_rows : int
        The one of them at which peers are judged.
    dense_rows : int
        The largest n for which the n × n exponential is formed.
    rank : int
        The r of the study over n, of the grid, and of the studies over k and threads.
    wide : (int, int, int)
        n, r and k of the study against the matrix-product rate.
    small : (int, int)
        n and r of the study of latency, and of each problem in the batch of problems.
    cores : sequence of int
        The m of the study of small cores.
    core_batch, problems : int
        How many small cores, and how many problems, are computed in one call.
    attention : (int, int, int)
        Batch, n and d of the attention-sized batch.
    grid : (int, int)
        n, and how many values of t.
    scaling_rows : int
        The n of the studies over r and k.
    widths : sequence of int
        Their values of r and of k.
    gemm : int
        The size of the square matrix product.
    repeats : int
        Samples of a contender; slow ones get fewer.
    pause : float
        Seconds of rest before a sample: threads of other libraries go on spinning for a while.
    sample : float
        Seconds that a sample lasts at least; fast calls are repeated inside one.
    budget : float
        Seconds that the samples of one contender in one case may take, beyond the first.
    cap : float
        Seconds beyond which a peer is left out at n above `judged_rows`.
    extra_peers : bool
        Whether SciPy's exponentials take part in the batch of problems.
    rows_alone : sequence of int
        The n at which there are no peers.

    Examples
    --------
    >>> import dataclasses
    >>> from lowrank_expm import bench
    >>> plan = dataclasses.replace(bench.Plan.quick(), rank=4)
    >>> plan.rank, plan.judged_rows
    (4, 1000000)
    """

    rows: tuple[int, ...]
    judged_rows: int
    dense_rows: int
    rank: int
    wide: tuple[int, int, int]
    small: tuple[int, int]
    cores: tuple[int, ...]
    core_batch: int
    problems: int
    attention: tuple[int, int, int]
    grid: tuple[int, int]
    scaling_rows: int
    widths: tuple[int, ...]
    gemm: int
    repeats: int
    pause: float
    sample: float
    budget: float
    cap: float
    extra_peers: bool = True
    rows_alone: tuple[int, ...] = ()

    @classmethod
    def full(cls) -> Plan:
        """Everything; a few minutes.

        Examples
        --------
        >>> from lowrank_expm import bench
        >>> bench.Plan.full().rows[-1]
        10000000
        """
        return cls(
            rows=(100, 1_000, 10_000, 100_000, 1_000_000, 3_000_000, 10_000_000),
            judged_rows=1_000_000,
            dense_rows=1_000,
            rank=8,
            wide=(100_000, 32, 32),
            small=(50, 2),
            cores=(4, 8, 16, 32, 64, 128),
            core_batch=64,
            problems=4096,
            attention=(96, 1024, 64),
            grid=(100_000, 100),
            scaling_rows=100_000,
            widths=(1, 2, 4, 8, 16, 32, 64),
            gemm=2000,
            repeats=9,
            pause=0.1,
            sample=0.02,
            budget=4.0,
            cap=8.0,
        )

    @classmethod
    def quick(cls) -> Plan:
        """The same in less than a minute: fewer sizes, fewer samples.

        Examples
        --------
        >>> from lowrank_expm import bench
        >>> bench.Plan.quick().repeats
        5
        """
        return dataclasses.replace(
            cls.full(),
            rows=(100, 1_000, 10_000, 100_000, 500_000, 1_000_000),
            widths=(1, 8, 64),
            repeats=5,
            sample=0.01,
            budget=0.5,
            extra_peers=False,
            rows_alone=(500_000,),
        )

    @classmethod
    def smoke(cls) -> Plan:
        """Tiny sizes, whose times mean nothing; about a second.

        Examples
        --------
        >>> from lowrank_expm import bench
        >>> bench.Plan.smoke().rows
        (40, 400)
        """
        return cls(
            rows=(40, 400),
            judged_rows=400,
            dense_rows=100,
            rank=2,
            wide=(200, 3, 3),
            small=(20, 2),
            cores=(4, 6),
            core_batch=3,
            problems=5,
            attention=(2, 40, 8),
            grid=(60, 4),
            scaling_rows=60,
            widths=(1, 2),
            gemm=20,
            repeats=2,
            pause=0.0,
            sample=0.0,
            budget=0.1,
            cap=1.0,
        )


@dataclass(frozen=True)
class Timing:
    """How long one contender took in one case.

    Attributes
    ----------
    case : str
        Such as "n = 1,000".
    size : int
        The number in it.
    name : str
        Of the contender.
    kind : {"ours", "peer", "limit", "part"}
        A part is a piece of the work, timed by itself.
    seconds, low, high : float
        Median and quartiles; NaN where the answer differs from ours.
    samples : int
        How many.
    ratio : float
        `seconds` over ours in the same case.
    rate : float or None
        Work done per second, in `unit`.
    unit : str
        "GB/s" or "GFlop/s".
    difference : float or None
        Of a peer's answer from ours, relative.
    agrees : bool
        Whether that is small enough.
    defect : float or None
        The largest orthogonality defect ‖QᵀQ − I‖₂ of a batch, where it is looked at.

    Examples
    --------
    >>> from lowrank_expm import bench
    >>> speed = (2e-3, 1e-3, 3e-3, 9, 1.0, 12.0, "GB/s")
    >>> timing = bench.Timing("n = 40", 40, "lowrank_expm", "ours", *speed, None, True, None)
    >>> timing.seconds, timing.rate
    (0.002, 12.0)
    """

    case: str
    size: int
    name: str
    kind: Kind
    seconds: float
    low: float
    high: float
    samples: int
    ratio: float
    rate: float | None
    unit: str
    difference: float | None
    agrees: bool
    defect: float | None


@dataclass(frozen=True)
class Target:
    """A measured number beside what it should be.

    Attributes
    ----------
    what : str
        What the number is.
    value : float
        NaN where it could not be measured.
    sense : {"at most", "at least"}
        On which side of the bound it should be.
    bound : float
        The target.
    unit : str
        Of both, such as "×" or "%".
    met : bool or None
        None where there is nothing to judge.

    Examples
    --------
    >>> from lowrank_expm import bench
    >>> target = bench.Target("memory", 5.0, "at most", 64.0, "MiB", True)
    >>> print(f"{target.what}: {target.value} {target.unit}, {target.sense} {target.bound}")
    memory: 5.0 MiB, at most 64.0
    """

    what: str
    value: float
    sense: Literal["at most", "at least"]
    bound: float
    unit: str
    met: bool | None


@dataclass(frozen=True)
class Section:
    """The outcome of one study.

    Attributes
    ----------
    key, title : str
        A short name, and what was done.
    timings : tuple of Timing
        In the order of the cases.
    targets : tuple of Target
        What they are judged by.
    notes : tuple of str
        What was left out, and why.

    Examples
    --------
    >>> from lowrank_expm import bench
    >>> section = bench.Section("n", "one call", (), (), ("no peers",))
    >>> section.key, section.notes
    ('n', ('no peers',))
    """

    key: str
    title: str
    timings: tuple[Timing, ...]
    targets: tuple[Target, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Results:
    """A whole benchmark.

    Attributes
    ----------
    machine : dict
        Processor, threads, versions, and the load when the run began.
    sections : tuple of Section
        One for each study.
    seconds : float
        How long all of it took.

    Examples
    --------
    >>> from lowrank_expm import bench
    >>> results = bench.run(bench.Plan.smoke())
    >>> results.agrees, len(results.sections)
    (True, 11)
    """

    machine: dict[str, str | int | float]
    sections: tuple[Section, ...]
    seconds: float

    @property
    def agrees(self) -> bool:
        """Whether every peer's answer is ours, to rounding."""
        return all(timing.agrees for section in self.sections for timing in section.timings)

    def to_dict(self) -> dict[str, Any]:
        """Give nested dictionaries and lists.

        Returns
        -------
        dict

        Examples
        --------
        >>> from lowrank_expm import bench
        >>> bench.Results({"threads": 2}, (), 1.5).to_dict()
        {'machine': {'threads': 2}, 'sections': (), 'seconds': 1.5, 'agrees': True}
        """
        return {**dataclasses.asdict(self), "agrees": self.agrees}


def run(plan: Plan, progress: Progress | None = None) -> Results:
    """Run all studies.

    Parameters
    ----------
    plan : Plan
        Sizes and efforts.
    progress : callable, optional
        Called as progress(what, done, total) before each case and at the end.

    Returns
    -------
    Results

    Notes
    -----
    The contenders of a case take turns, with a rest and an untimed call before each sample;
    medians and quartiles over the samples are kept. A peer whose answer differs from ours by more
    than 1e3 u max(1, angle), relative, u the unit roundoff, is not timed.

    Examples
    --------
    >>> from lowrank_expm import bench
    >>> results = bench.run(bench.Plan.smoke())
    >>> results.agrees
    True
    """
    import scipy.linalg
    import scipy.sparse.linalg  # noqa: F401  (imported now, so that no peer's time contains it)

    from . import _machine, _threads
    from ._studies import studies

    start, machine = time.perf_counter(), _machine.describe()
    rates: dict[str, float] = {}
    planned, threads = studies(plan, rates), _threads.threads()
    steps = _Steps(progress, sum(len(study.cases) for study in planned))
    try:
        sections = tuple(_run_study(plan, study, rates, steps) for study in planned)
    finally:
        _threads.set_threads(threads)
    steps.report("done")
    return Results(machine, sections, time.perf_counter() - start)


def _run_study(plan: Plan, study: Study, rates: dict[str, float], steps: _Steps) -> Section:
    """Run one study; the rates of limits are noted for later ones."""
    from ._contest import compare, section

    timings: list[Timing] = []
    for case in study.cases:
        steps.report(f"{study.key} {case.label}")
        timings += compare(plan, case, timings)
        steps.done += 1
    rates.update({t.name: t.rate for t in timings if t.kind == "limit" and t.rate})
    return section(study, timings)


@dataclass
class _Steps:
    """How far a run has come."""

    progress: Progress | None
    total: int
    done: int = 0

    def report(self, what: str) -> None:
        """Tell whoever watches."""
        if self.progress is not None:
            self.progress(what, self.done, self.total)


def _peak_of_one_call(n: int, r: int) -> float:
    """Run one call in this new process; the growth of its resident memory, less the result."""
    from ._machine import resident
    from ._studies import problem
    from .skew import skew_expm_multiply

    skew_expm_multiply(*problem((min(n, 50_000),), r))
    U, V, b = problem((n,), r)
    before = resident("VmRSS")
    y = skew_expm_multiply(U, V, b)
    return max(0.0, resident("VmHWM") - before - y.nbytes)


# -------------------------------------------------------------------------------------- picture

# Okabe and Ito's colours, told apart in print and by the colour-blind.
_STYLES = {
    OURS: ("#000000", "o", "-"),
    STREAM: ("#000000", "", "--"),
    PLAIN: ("#0072B2", "s", "-"),
    QR: ("#D55E00", "^", "-"),
    ARNOLDI: ("#009E73", "v", "-"),
    EXPM_MULTIPLY: ("#CC79A7", "D", "-"),
    KRYLOV: ("#E69F00", "P", "-"),
    EXPM: ("#56B4E9", "X", "-"),
}


def plot(results: Results, file: Any, format: str = "png") -> None:
    """Draw the time of one call against n.

    Parameters
    ----------
    results : Results
        From `run`.
    file : path or binary file
        Where to write.
    format : str, optional
        Such as "png", "pdf" or "svg".

    Returns
    -------
    None

    Raises
    ------
    ValueError
        Where matplotlib is not installed.

    Notes
    -----
    Both axes are logarithmic; the dashed line is the time to stream the arrays through memory.
    Bars are quartiles.

    Examples
    --------
    >>> import io
    >>> from lowrank_expm import bench
    >>> results = bench.run(bench.Plan.smoke())
    >>> file = io.BytesIO()
    >>> bench.plot(results, file)
    >>> file.getvalue()[1:4]
    b'PNG'
    """
    from ._machine import require_matplotlib

    require_matplotlib()
    from matplotlib.figure import Figure

    section = next(s for s in results.sections if s.key == "n")
    figure = Figure(figsize=(7.5, 6.2), layout="constrained")
    axes = figure.add_subplot()
    for name, style in _STYLES.items():
        _draw_line(axes, [t for t in section.timings if t.name == name], style)
    axes.set(xscale="log", yscale="log", xlabel="rows n", ylabel="time of one call (seconds)")
    machine = f"{results.machine['processor']}, {results.machine['threads']} threads"
    axes.set_title(f"{section.title}\n{machine}", fontsize=10)
    axes.grid(which="major", color="0.85")
    figure.legend(loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    figure.savefig(file, format=format, dpi=200)


def _draw_line(axes: Any, timings: list[Timing], style: tuple[str, str, str]) -> None:
    """Draw a contender's medians and quartiles."""
    timings = [t for t in timings if t.samples]
    if not timings:
        return
    colour, marker, line = style
    seconds = np.array([t.seconds for t in timings])
    spread = [seconds - [t.low for t in timings], [t.high for t in timings] - seconds]
    axes.errorbar(
        [t.size for t in timings],
        seconds,
        yerr=np.maximum(spread, 0),
        color=colour,
        marker=marker,
        linestyle=line,
        markersize=5,
        linewidth=2.2 if timings[0].kind == "ours" else 1.3,
        capsize=2,
        label=timings[0].name if timings[0].kind != "limit" else f"limit: {timings[0].name}",
    )
