"""Fixtures: an array library on a device that is not NumPy's, and a number of threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import array_api_strict
import numpy as np
import pytest
from hypothesis import settings

from lowrank_expm import _threads

# The same examples in every CI run, so that a change lands or fails by what it changes.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("long", max_examples=2000, deadline=None)
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE", "ci" if "CI" in os.environ else "default")
)


@dataclass(frozen=True)
class Library:
    """An array library and the device to run on."""

    xp: Any
    device: Any

    def asarray(self, a: Any) -> Any:
        """A NumPy array in this library, on this device."""
        return self.xp.asarray(np.asarray(a), device=self.device)

    def numpy(self, a: Any) -> np.ndarray:
        """An array of this library in NumPy; it must still be on the device."""
        if self.xp is np:
            return np.asarray(a)
        assert a.device == self.device
        return np.asarray(a.to_device(self.xp.Device("CPU_DEVICE")))


LIBRARIES = {
    "numpy": Library(np, "cpu"),
    "array_api_strict": Library(array_api_strict, array_api_strict.Device("device1")),
}


@pytest.fixture(params=list(LIBRARIES))
def library(request: pytest.FixtureRequest) -> Library:
    """Every array library in turn; the strict one refuses what only NumPy has."""
    return LIBRARIES[request.param]


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """The setter of the number of threads, which is put back afterwards."""
    before = _threads.threads()
    yield _threads.set_threads
    _threads.set_threads(before)
