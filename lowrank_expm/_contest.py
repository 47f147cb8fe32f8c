"""Contenders in a case of a benchmark: checked, then timed in turns."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from .bench import OURS, Kind, Plan, Section, Target, Timing

Array: TypeAlias = np.ndarray[Any, Any]

ANGLE = 3.0  # of every problem, about


def _nothing() -> None:
    """Prepare nothing."""


def _itself(result: Any) -> Array:
    """Take a result for the answer."""
    return result


@dataclass(frozen=True)
class Contender:
    """One way to do the work of a case; `seconds` in place of a call is a computed limit."""

    name: str
    kind: Kind
    call: Callable[[], Any] = _nothing
    work: float = 0.0
    unit: str = ""
    prepare: Callable[[], None] = _nothing
    answer: Callable[[Any], Array] = _itself
    defect: Callable[[Any], float] | None = None
    beside: str = OURS  # the contender whose answer and time it is compared with
    seconds: float | None = None


@dataclass(frozen=True)
class Case:
    """One size; its data exist only while it is measured."""

    label: str
    size: int
    contenders: Callable[[], Iterable[Contender]]


@dataclass(frozen=True)
class Study:
    """Cases that belong together, and how to judge them."""

    key: str
    title: str
    cases: list[Case]
    judge: Callable[[list[Timing]], Iterable[Target]] = lambda timings: ()
    notes: tuple[str, ...] = ()


@dataclass
class Samples:
    """A contender on its way through a case."""

    contender: Contender
    difference: float | None = None
    agrees: bool = True
    defect: float | None = None
    estimate: float = math.nan
    wanted: int = 0
    times: list[float] = field(default_factory=list)

    def take(self, plan: Plan) -> None:
        """Add one sample: the mean over as many calls as make it long enough to be timed."""
        time.sleep(plan.pause)
        self.contender.prepare()
        if self.estimate < 0.2:
            self.contender.call()
        calls = min(1000, max(1, math.ceil(plan.sample / self.estimate)))
        start = time.perf_counter()
        for _ in range(calls):
            self.contender.call()
        self.times.append((time.perf_counter() - start) / calls)


def compare(plan: Plan, case: Case, before: Sequence[Timing]) -> list[Timing]:
    """Check the contenders of a case, then time them in turns."""
    answers: dict[str, Array] = {}
    entries = [
        _enter(plan, contender, answers)
        for contender in case.contenders()
        if _is_affordable(plan, contender, case.size, before)
    ]
    answers.clear()
    for turn in range(plan.repeats):
        for entry in entries:
            if turn < entry.wanted:
                entry.take(plan)
    medians = {entry.contender.name: _median(entry) for entry in entries}
    return [
        _timing(case, entry, medians.get(entry.contender.beside, math.nan)) for entry in entries
    ]


def _is_affordable(plan: Plan, contender: Contender, size: int, before: Sequence[Timing]) -> bool:
    """Whether a peer can be expected to take no longer than the cap allows."""
    times = [t for t in before if t.name == contender.name]
    if contender.kind != "peer" or size <= plan.judged_rows:
        return True
    return bool(times) and times[-1].seconds * size / times[-1].size <= plan.cap


def _enter(plan: Plan, contender: Contender, answers: dict[str, Array]) -> Samples:
    """Call a contender once, check its answer, and decide on the number of samples."""
    entry = Samples(contender)
    if contender.seconds is not None:
        entry.times = [contender.seconds]
        return entry
    contender.prepare()
    result, first = _timed(contender.call)
    if contender.defect is not None:
        entry.defect = contender.defect(result)
    if contender.kind == "ours":
        answers[contender.name] = contender.answer(result)
    elif contender.kind == "peer":
        _check(entry, contender.answer(result), answers[contender.beside])
    del result
    if not entry.agrees:
        return entry
    _plan_samples(plan, entry, first)
    return entry


def _plan_samples(plan: Plan, entry: Samples, first: float) -> None:
    """Decide on the number of samples; for slow peers a call already made is the only one.

    A first call that is slow by accident is not one of those: it is repeated, unless very slow.
    """
    is_peer = entry.contender.kind == "peer"
    second = first
    if not (is_peer and first > 4 * plan.budget):
        second = _timed(entry.contender.call)[1]
    entry.estimate = max(min(first, second), 1e-9)
    if is_peer and entry.estimate > plan.budget / 2:
        entry.times = [entry.estimate]
    else:
        entry.wanted = max(2, min(plan.repeats, int(plan.budget / entry.estimate)))


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """A call's result and how long it took."""
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start


def _check(entry: Samples, answer: Array, expected: Array) -> None:
    """Compare an answer with ours."""
    entry.difference = float(np.linalg.norm(answer - expected) / np.linalg.norm(expected))
    unit = float(np.finfo(expected.dtype).eps) / 2
    entry.agrees = answer.shape == expected.shape and entry.difference <= 1e3 * unit * ANGLE


def _median(entry: Samples) -> float:
    """The median of the samples; NaN where there are none."""
    return float(np.median(entry.times)) if entry.times else math.nan


def _timing(case: Case, entry: Samples, ours: float) -> Timing:
    """Sum up the samples of a contender; `ours` is the median that it is compared with."""
    c, seconds = entry.contender, _median(entry)
    low, high = np.quantile(entry.times, [0.25, 0.75]) if entry.times else (math.nan, math.nan)
    return Timing(
        case=case.label,
        size=case.size,
        name=c.name,
        kind=c.kind,
        seconds=seconds,
        low=float(low),
        high=float(high),
        samples=len(entry.times),
        ratio=seconds / ours,
        rate=c.work / seconds / 1e9 if c.work else None,
        unit=c.unit,
        difference=entry.difference,
        agrees=entry.agrees,
        defect=entry.defect,
    )


def section(study: Study, timings: list[Timing]) -> Section:
    """The outcome of a study, with a note on what was left out."""
    sizes = sorted({t.size for t in timings})
    short = sorted(
        {t.name for t in timings if t.kind == "peer"}
        - {t.name for t in timings if t.kind == "peer" and t.size == sizes[-1]}
    )
    notes = [*study.notes, *(f"{name}: left out at the largest sizes" for name in short)]
    return Section(
        study.key, study.title, tuple(timings), tuple(study.judge(timings)), tuple(notes)
    )


def find(timings: Iterable[Timing], name: str, size: int | None = None) -> Timing | None:
    """The timing of a contender, at a size."""
    found = [t for t in timings if t.name == name and size in (None, t.size)]
    return found[0] if found else None


def seconds(timings: Iterable[Timing], name: str, size: int | None = None) -> float:
    """Its seconds; NaN where it was not timed."""
    found = find(timings, name, size)
    return math.nan if found is None else found.seconds


def rate(timings: Iterable[Timing], name: str, size: int | None = None) -> float:
    """Its rate; NaN where it was not timed."""
    found = find(timings, name, size)
    return math.nan if found is None or found.rate is None else found.rate


def at_most(what: str, value: float, bound: float, unit: str = "×") -> Target:
    """A number that should be small."""
    return Target(what, value, "at most", bound, unit, None if value != value else value <= bound)


def at_least(what: str, value: float, bound: float, unit: str = "×") -> Target:
    """A number that should be large."""
    return Target(what, value, "at least", bound, unit, None if value != value else value >= bound)
