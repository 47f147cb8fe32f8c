"""The derivatives tried on the caller's own data; see `verify.check`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from . import _inputs
from .derivatives import jvp, vjp
from .passes.basis import length
from .skew import LowRankSkew, skew_expm_multiply

# The contract: relative errors of at most 1e3 u max(1, ρ). Differences are taken in double
# precision, with a step that balances rounding, u ρ over the step, against its square.
ALLOWED = 1e3
# A relative error that something quite different has too: no smaller limit, no verdict.
UNDECIDABLE = 1.0


Arrays = list[np.ndarray]


class Found(NamedTuple):
    """Two relative errors, and what each may be."""

    adjoint_error: float
    difference_error: float
    adjoint_limit: float
    difference_limit: float

    @property
    def passed(self) -> bool:
        """Whether each is within its limit, where that could tell right from wrong."""
        pairs = (
            (self.adjoint_error, self.adjoint_limit),
            (self.difference_error, self.difference_limit),
        )
        return all(error <= limit or limit >= UNDECIDABLE for error, limit in pairs)


def measure(S: LowRankSkew, B: np.ndarray, t: Any, dtype: np.dtype) -> Found:
    """Adjointness of jvp and vjp, and jvp against central differences, in random directions.

    The direction turns by about one radian, or is of the size of U and V where that is less. The
    derivatives are tried in the precision of `dtype`, that of the operator, on a B of ordinary
    size: they are linear in it.
    """
    rng = np.random.default_rng(0)
    real = _inputs.real_part(dtype)
    rho = _rho(S, t)
    u, double = (float(np.finfo(a).eps) / 2 * max(1.0, rho) for a in (real, np.float64))
    given = [a.astype(_inputs.with_kind(real, a), copy=False) for a in (S.U, S.V, _ordinary(B))]
    size = _norm(given[2]) / np.sqrt(max(B.size, 1)) or 1.0
    moved = [*_directions(rng, S, t, rho), size * _like(rng, B)]
    moved = [d.astype(a.dtype, copy=False) for d, a in zip(moved, given, strict=True)]
    _, dY = jvp(*given, *moved, t=t)
    return Found(
        adjoint_error=_adjointness(rng, given, moved, t, dY),
        difference_error=_difference(given, moved, t, dY, double ** (1 / 3)),
        adjoint_limit=ALLOWED * u,
        difference_limit=ALLOWED * (u + double ** (2 / 3)),
    )


def _ordinary(B: np.ndarray) -> np.ndarray:
    """B in double precision, times a power of two that makes its largest entry about one."""
    B = B.astype(np.result_type(B, np.float64), copy=False)
    largest = max((float(np.abs(a).max(initial=0.0)) for a in (B.real, B.imag)), default=0.0)
    exponent = np.frexp(largest)[1] if np.isfinite(largest) else 0
    return B * 2.0 ** -max(int(exponent), -1000)


def _difference(given: Arrays, moved: Arrays, t: Any, dY: np.ndarray, h: float) -> float:
    """‖(Y(h) − Y(−h))/2h − dY‖ over ‖dY‖ + ‖dB‖."""
    results = []
    wide = [[a.astype(np.result_type(a, np.float64)) for a in arrays] for arrays in (given, moved)]
    for step in (h, -h):
        U, V, B = (a + step * d for a, d in zip(*wide, strict=True))
        results.append(skew_expm_multiply(U, V, B, t))
    ahead, behind = results
    size = _norm(dY) + _norm(moved[2])
    return _norm((ahead - behind) / (2 * h) - dY) / size if size else 0.0


def _adjointness(rng: Any, given: Arrays, moved: Arrays, t: Any, dY: np.ndarray) -> float:
    """|⟨Ȳ, dY⟩ − ⟨Ū, dU⟩ − ⟨V̄, dV⟩ − ⟨B̄, dB⟩| over the sum of the products of lengths."""
    U, V, B = given
    Ybar = _like(rng, dY).astype(dY.dtype)
    bars = vjp(U, V, B, t=t)[1](Ybar)[:3]
    pairs = [(Ybar, dY), *zip(bars, moved, strict=True)]
    inner = [_inner(a, b) for a, b in pairs]
    size = sum(_norm(a) * _norm(b) for a, b in pairs)
    return abs(inner[0] - sum(inner[1:])) / size if size else 0.0


def _rho(S: LowRankSkew, t: Any) -> float:
    """|t| Σ ‖uⱼ‖‖vⱼ‖, which is at least |t| ‖U‖₂‖V‖₂ of balanced columns."""
    u, v = _lengths(S)
    return float(np.abs(t).max(initial=0.0) * (u * v).sum(axis=-1).max(initial=0.0))


def _lengths(S: LowRankSkew) -> tuple[np.ndarray, np.ndarray]:
    """The column lengths of U and V in double precision."""
    return length(S.U, axis=-2), length(S.V, axis=-2)


def _directions(rng: Any, S: LowRankSkew, t: Any, rho: float) -> list[np.ndarray]:
    """Random directions with columns of the lengths of U's and V's, divided by ρ above 1.

    Where a column is zero its direction has a length that with its partner turns by a radian.
    """
    far = max(1.0, float(np.abs(t).max(initial=0.0)))
    u, v = _lengths(S)
    found = []
    for a, own, other in ((S.U, u, v), (S.V, v, u)):
        partner = np.where(other > 0, other, 1.0) * far
        size = np.where(own > 0, own / max(1.0, rho), 1.0 / partner)
        found.append(_like(rng, a) * (size[..., None, :] / np.sqrt(max(a.shape[-2], 1))))
    return found


def _like(rng: Any, a: np.ndarray) -> np.ndarray:
    """Normal numbers of an array's shape, complex where it is."""
    x = rng.standard_normal(a.shape)
    return x + 1j * rng.standard_normal(a.shape) if a.dtype.kind == "c" else x


def _norm(a: np.ndarray) -> float:
    """The Frobenius norm in double precision."""
    return float(length(np.ravel(a), axis=0))


def _inner(a: np.ndarray, b: np.ndarray) -> float:
    """Re ⟨a, b⟩ in double precision."""
    total = np.sum(np.real(a) * np.real(b), dtype=float)
    return float(total + np.sum(np.imag(a) * np.imag(b), dtype=float))
