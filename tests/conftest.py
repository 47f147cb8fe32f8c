"""Fixtures: an array library on a device that is not NumPy's, and a number of threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import settings

from lowrank_expm import _threads

from .libraries import LIBRARIES, Library

# The same examples in every CI run, so that a change lands or fails by what it changes.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("long", max_examples=2000, deadline=None)
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE", "ci" if "CI" in os.environ else "default")
)


def _installed() -> Iterator[Any]:
    """The libraries that can run here; what needs a device is marked."""
    for name, known in LIBRARIES.items():
        if known.installed:
            yield pytest.param(name, marks=[pytest.mark.gpu] if name == "cupy" else [])


@pytest.fixture(params=list(_installed()))
def library(request: pytest.FixtureRequest) -> Iterator[Library]:
    """Every installed array library in turn, on a device that is not NumPy's if it has one."""
    if request.param != "jax":
        yield LIBRARIES[request.param]
        return
    import jax

    with jax.enable_x64(True):
        yield LIBRARIES[request.param]


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """The setter of the number of threads, which is put back afterwards."""
    before = _threads.threads()
    yield _threads.set_threads
    _threads.set_threads(before)
