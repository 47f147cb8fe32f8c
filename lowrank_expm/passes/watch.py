"""Whoever wants to see the passes at work: a progress bar, or a test that counts rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Observer = Callable[[str, int], object]

_observer: ContextVar[Observer | None] = ContextVar("lowrank_expm_observer", default=None)


@contextmanager
def watching(observer: Observer) -> Iterator[None]:
    """Call observer(name, rows) after each block of rows that a pass in this context has done."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def done(name: str, rows: int) -> None:
    """Tell the observer, if there is one."""
    observer = _observer.get()
    if observer is not None:
        observer(name, rows)


def watched() -> bool:
    """Whether there is an observer."""
    return _observer.get() is not None
