"""numba, with its cache where there is a place for one and without where there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba

# Reassociation and fused products, but no assumption that infinities and NaN are absent.
FAST = {"reassoc", "contract", "nsz"}


def jit(function: Callable[..., Any]) -> Any:
    """Compile lazily, releasing the GIL; cached on disk if a directory can be written."""
    options: Any = {"nogil": True, "fastmath": FAST, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no locator available: neither install nor home can be written
        return numba.njit(**options)(function)
