"""The passes in array-API operations, for the libraries without a file of their own.

The signatures are those of `numpy_passes`, so that what is written for the one runs on the
other; `dtype` and `out` are for NumPy alone. All operands have one dtype.
"""

from __future__ import annotations

from typing import Any

from .._array import Array, adjoint, namespace
from .frame import Frame


def accumulate(frame: Frame, B: Array, dtype: Any = None) -> tuple[Array, Array]:
    """G = FᴴF and T = FᴴB."""
    return gram(frame), project(frame, B)


def gram(frame: Frame, dtype: Any = None) -> Array:
    """G = FᴴF, block by block: [U V] side by side is never formed."""
    xp, columns = namespace(*frame.columns), frame.columns
    if len(columns) == 1:
        return adjoint(columns[0]) @ columns[0]
    U, V = columns
    across = adjoint(U) @ V
    above = beside(adjoint(U) @ U, across)
    below = beside(adjoint(across), adjoint(V) @ V)
    return xp.concat([*xp.broadcast_arrays(above, below)], axis=-2)


def project(frame: Frame, B: Array, dtype: Any = None) -> Array:
    """T = FᴴB."""
    parts = [adjoint(a) @ B for a in frame.columns]
    xp = namespace(B)
    return parts[0] if len(parts) == 1 else xp.concat(_same_batch(*parts), axis=-2)


def update(
    frame: Frame, Z: Array, B: Array | None, dtype: Any = None, out: Array | None = None
) -> Array:
    """B + F Z."""
    start = 0
    for a in frame.columns:
        part = a @ Z[..., start : start + a.shape[-1], :]
        B = part if B is None else B + part
        start += a.shape[-1]
    return B


def combine(
    frame: Frame, Ybar: Array, B: Array, K: Array, Z: Array, Tbar: Array, dtype: Any = None
) -> tuple[Array, Array, Array]:
    """Ū V̄ = Ȳ Zᴴ + B T̄ᴴ + F K, split in two, and B̄ = Ȳ + F T̄."""
    r = frame.columns[0].shape[-1]
    bars = []
    for rows in (slice(None, r), slice(r, None)):
        bar = Ybar @ adjoint(Z[..., rows, :]) + B @ adjoint(Tbar[..., rows, :])
        bars.append(update(frame, K[..., rows], bar))
    return bars[0], bars[1], update(frame, Tbar, Ybar)


def beside(*parts: Array) -> Array:
    """Matrices side by side, their batches broadcast."""
    return namespace(*parts).concat(_same_batch(*parts), axis=-1)


def _same_batch(*parts: Array) -> list[Array]:
    """Matrices of one batch shape."""
    xp = namespace(*parts)
    if all(a.shape[:-2] == parts[0].shape[:-2] for a in parts):
        return list(parts)
    batch = xp.broadcast_arrays(*(a[..., 0, 0] for a in parts))[0].shape
    return [xp.broadcast_to(a, (*batch, *a.shape[-2:])) for a in parts]
