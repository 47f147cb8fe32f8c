"""The machine of a benchmark: how fast it streams, how much memory a call takes, its name."""

from __future__ import annotations

import importlib.util
import math
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from . import _threads
from ._numba import jit
from ._version import __version__

Array = np.ndarray[Any, Any]

CHUNK = 1 << 16  # entries that a streaming kernel takes at a time


# Slices, and loops that start at zero: else numba looks out for negative indices, one at a time.


@jit
def _sum_chunks(first, last, a, sums):  # type: ignore[no-untyped-def]
    """Read chunks of an array."""
    for i in range(first, last):
        chunk = a[i * CHUNK : (i + 1) * CHUNK]
        total = 0.0
        for j in range(chunk.size):
            total += chunk[j]
        sums[i] = total


@jit
def _copy_chunks(first, last, a, out):  # type: ignore[no-untyped-def]
    """Copy chunks of an array."""
    source, target = a[first * CHUNK : last * CHUNK], out[first * CHUNK : last * CHUNK]
    for j in range(source.size):
        target[j] = source[j]


@jit
def _fill_chunks(first, last, value, out):  # type: ignore[no-untyped-def]
    """Write chunks of an array."""
    target = out[first * CHUNK : last * CHUNK]
    for j in range(target.size):
        target[j] = value


def read(a: Array) -> None:
    """Read an array on all threads."""
    a = a.reshape(-1)
    chunks = -(-a.size // CHUNK)
    sums = np.empty(chunks)
    _threads.share(chunks, CHUNK, lambda first, last: _sum_chunks(first, last, a, sums))


def copy(a: Array, out: Array) -> None:
    """Copy an array on all threads."""
    chunks = -(-a.size // CHUNK)
    _threads.share(chunks, CHUNK, lambda first, last: _copy_chunks(first, last, a, out))


def write(shape: tuple[int, ...]) -> None:
    """Write a new array on all threads."""
    out = np.empty(shape)
    flat = out.reshape(-1)
    chunks = -(-flat.size // CHUNK)
    _threads.share(chunks, CHUNK, lambda first, last: _fill_chunks(first, last, 1.0, flat))


def two_sweeps(U: Array, V: Array, b: Array, y: Array) -> None:
    """Read U, V and b twice and write y once: what one call cannot do without."""
    for a in (U, V, b, U, V):
        read(a)
    copy(b, y)


def sweep_bytes(U: Array, b: Array) -> int:
    """The bytes that takes."""
    return 4 * U.nbytes + 3 * b.nbytes


def extra_memory(n: int, r: int) -> float:
    """Bytes that one call takes beyond inputs and result, measured in a new process."""
    script = f"from lowrank_expm import bench; print(bench._peak_of_one_call({n}, {r}))"
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=False,
    )
    return float(done.stdout) if not done.returncode else math.nan


def resident(field: str) -> float:
    """Resident memory now (VmRSS) or at its highest (VmHWM); NaN where Linux does not tell."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return math.nan
    found = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    return 1024.0 * int(found[0]) if found else math.nan


def cache_bytes() -> float:
    """The size of the last-level cache; 32 MiB where Linux does not tell."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text(encoding="ascii").strip()
        factor = {"K": 2**10, "M": 2**20}.get(text[-1:], 0)
        sizes.append(factor * int(text[:-1]) if factor else 0)
    return max(sizes, default=0) or 32 * 2**20


def describe() -> dict[str, str | int | float]:
    """Processor, threads, versions, and how busy it is."""
    names = ("numpy", "scipy", "numba")
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else math.nan
    return {
        "processor": _processor(),
        "threads": _threads.threads(),
        "processors": os.cpu_count() or 1,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "lowrank_expm": __version__,
        **{name: metadata.version(name) for name in names},
        "blas": f"{blas.get('name', 'unknown')} {blas.get('version', '')}".strip(),
        "load at the start": load,
    }


def _processor() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def require_matplotlib() -> None:
    """Say what to install where matplotlib is missing; it is not imported."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "the plot needs matplotlib; python -m pip install 'lowrank_expm[bench]' installs it"
        )
