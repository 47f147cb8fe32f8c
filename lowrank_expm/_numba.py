"""numba, with its cache where there is a place for one and without where there is none."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numba

# Reassociation and fused products, but no assumption that infinities and NaN are absent.
FAST = {"reassoc", "contract", "nsz"}


def jit(function: Callable[..., Any]) -> Any:
    """Compile lazily, releasing the GIL; cached on disk if a directory can be written."""
    return _compiled(function, nogil=True)


def inner(function: Callable[..., Any]) -> Any:
    """The same for a function that only compiled functions call: no wrappers are made for it."""
    return _compiled(function, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def _compiled(function: Callable[..., Any], **options: Any) -> Any:
    """A numba dispatcher with this library's options."""
    options = {"fastmath": FAST, "error_model": "numpy", **options}
    file = function.__code__.co_filename
    try:  # a file inside an archive has no place beside it
        return numba.njit(cache=os.path.exists(file), **options)(function)
    except RuntimeError:  # no locator available: neither install nor home can be written
        return numba.njit(**options)(function)
