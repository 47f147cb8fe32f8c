"""Fixtures: an array library on a device that is not NumPy's, and a number of threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

from lowrank_expm import _threads

from .libraries import LIBRARIES, Library, ready

# The same examples in every CI run, so that a change lands or fails by what it changes.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("long", max_examples=2000, deadline=None)
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE", "ci" if "CI" in os.environ else "default")
)


# The libraries that can run here; what needs a device is marked.
INSTALLED = [
    pytest.param(name, marks=[pytest.mark.gpu] if name == "cupy" else [])
    for name, known in LIBRARIES.items()
    if known.installed
]


@pytest.fixture(params=[one for one in INSTALLED if one.values[0] != "dask"])
def library(request: pytest.FixtureRequest) -> Iterator[Library]:
    """Every installed library of arrays in memory, on a device of its own if it has one."""
    with ready(request.param) as library:
        yield library


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """The setter of the number of threads, which is put back afterwards."""
    before = _threads.threads()
    yield _threads.set_threads
    _threads.set_threads(before)
