"""The array libraries, what each can do, and where that is tested: `python -m tests.libraries`.

The tests run over these declarations, and the table of the documentation is printed from them. A
library that does not declare a feature is expected to refuse it, in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

FEATURES = {
    "batch": "leading batch axes",
    "grid": "a grid of t",
    "complex": "complex factors and vectors",
    "half": "float16 (bfloat16 where the library has it) in and out",
    "routes": "auto, qr and direct besides gram",
    "objects": "LowRankSkew and LowRankUnitary",
    "derivatives": "derivatives.jvp and derivatives.vjp",
    "out": "out=",
    "autograd": "the library's own differentiation",
    "jit": "under the library's compiler",
    "device": "results stay on the device of the arguments",
}
NUMERIC = frozenset({"batch", "grid", "complex", "routes", "objects", "derivatives", "device"})


@dataclass(frozen=True)
class Library:
    """An array library and a device of it, one that is not NumPy's where there is one."""

    name: str
    title: str
    tested: str
    features: frozenset[str]
    place: Callable[[Any], Any] = field(repr=False, default=lambda xp: None)
    module: str = ""

    @property
    def installed(self) -> bool:
        """Whether tests can run it."""
        if self.name == "cupy":
            return _cuda()
        return find_spec(self.name) is not None

    @property
    def xp(self) -> Any:
        """Its namespace."""
        return import_module(self.module or self.name)

    @property
    def device(self) -> Any:
        """Where its arrays lie in tests."""
        return self.place(self.xp)

    def asarray(self, a: Any) -> Any:
        """A NumPy array in this library, on the device."""
        a = np.asarray(a)
        if self.name == "dask":
            rows = max(0, a.ndim - 2)
            chunks = [max(1, n // 3) if i == rows else -1 for i, n in enumerate(a.shape)]
            return self.xp.from_array(a, chunks=tuple(chunks) if a.size else -1)
        if self.name == "torch":
            return self.xp.asarray(a.copy())
        if self.device is None:
            return self.xp.asarray(a)
        return self.xp.asarray(a, device=self.device)

    def numpy(self, a: Any) -> np.ndarray:
        """An array of this library in NumPy; it must still be on the device."""
        if self.name == "array_api_strict":
            assert a.device == self.device
            return np.asarray(a.to_device(self.xp.Device("CPU_DEVICE")))
        if self.name == "cupy":
            return np.asarray(a.get())
        if self.name == "dask":
            return np.asarray(a.compute())
        return np.asarray(a.detach() if self.name == "torch" else a)


def _cuda() -> bool:
    """Whether CuPy finds a device."""
    if find_spec("cupy") is None:
        return False
    import cupy

    try:
        return bool(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return False


LIBRARIES = {
    library.name: library
    for library in (
        Library("numpy", "NumPy", "every run", NUMERIC | {"half", "out"}, lambda xp: "cpu"),
        Library(
            "array_api_strict",
            "array-api-strict, on its second device",
            "every run",
            NUMERIC | {"out"},
            lambda xp: xp.Device("device1"),
        ),
        Library(
            "torch",
            "PyTorch, CPU",
            "every run with PyTorch installed",
            NUMERIC | {"half", "out", "autograd", "jit"},
        ),
        Library(
            "jax",
            "JAX, CPU, with x64",
            "every run with JAX installed",
            NUMERIC | {"half", "autograd", "jit"},
            module="jax.numpy",
        ),
        Library(
            "dask",
            "Dask, in blocks of rows",
            "every run with Dask installed, also on clusters of processes",
            frozenset({"batch", "grid", "complex", "routes", "half"}),
            module="dask.array",
        ),
        Library(
            "cupy",
            "CuPy",
            "by hand on a machine with CUDA; its way through the library by array-api-strict",
            NUMERIC | {"half", "out"},
        ),
    )
}


@contextmanager
def ready(name: str) -> Iterator[Library]:
    """A library, set up to compute in double precision."""
    if name != "jax":
        yield LIBRARIES[name]
        return
    import jax

    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield LIBRARIES[name]
    jax.config.update("jax_enable_x64", before)


def table() -> str:
    """The declarations as a Markdown table."""
    titles = [library.title for library in LIBRARIES.values()]
    rows = [["", *titles], ["---"] * (len(titles) + 1)]
    for feature, meaning in FEATURES.items():
        marks = ["yes" if feature in x.features else "–" for x in LIBRARIES.values()]
        rows.append([meaning, *marks])
    rows.append(["tested", *(library.tested for library in LIBRARIES.values())])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


if __name__ == "__main__":
    print(table())
