"""Measures of orthogonality and conditioning; they return values and print nothing.

What is measured here is of the size of rounding, so it is computed with about twice the working
precision and from the operators' own numbers, not by the routines under judgement.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from . import _derivative_check, _exact, _inputs
from ._exact import LONGEST
from ._jacobian import JacobianSpectrum, exponential_jacobian, jacobian_singular_values
from .passes import Frame
from .passes.basis import length, triangular_factor
from .skew import LowRankSkew, Method
from .unitary import LowRankUnitary

__all__ = [
    "Estimate",
    "JacobianSpectrum",
    "Report",
    "basis_condition",
    "check",
    "expm_condition",
    "exponential_jacobian",
    "jacobian_singular_values",
    "orthogonality_defect",
]

# The contract of "auto": defect and norm drift stay below 80 √m u.
ALLOWED = 80.0
# Entries of B to take there and back at a time.
SCRATCH = 1 << 24
PROBES = 8
POWER_STEPS = 6


class Estimate(float):
    """A number that is an estimate, and says so when it is shown.

    Examples
    --------
    >>> from lowrank_expm import verify
    >>> verify.Estimate(0.5)
    0.5 (estimated from 8 probes)
    >>> verify.Estimate(0.5) < 1
    True
    """

    def __repr__(self) -> str:
        return f"{float(self)!r} (estimated from {PROBES} probes)"


def orthogonality_defect(Q: Any) -> Any:
    """The defect ‖QᴴQ − I‖₂: 0 for a unitary operator, a few u for a good one.

    Parameters
    ----------
    Q : LowRankUnitary, array_like (…, n, n), or scipy.sparse.linalg.LinearOperator

    Returns
    -------
    float, ndarray or Estimate
        An array for a batch. For a LinearOperator an `Estimate` from below, by a power iteration
        on QᴴQ − I from 8 random vectors.

    Raises
    ------
    TypeError
        For anything else, and for an operator made of arrays of another library than NumPy.

    Notes
    -----
    For Q = I + F C Fᴴ, QᴴQ − I = F D Fᴴ with D = C + Cᴴ + CᴴGC and G = FᴴF: one pass over the
    rows, O(n m²). G and D are formed from exact products of slices (Ozaki et al. 2012,
    doi:10.1007/s11075-011-9478-1), so that the result is the defect of the operator and not of
    its measurement.

    Examples
    --------
    >>> import numpy as np
    >>> from lowrank_expm import verify
    >>> verify.orthogonality_defect(np.diag([1.0, 2.0]))
    3.0
    """
    if isinstance(Q, LowRankUnitary):
        return _low_rank_defect(Q)
    if hasattr(Q, "matvec") and hasattr(Q, "rmatvec"):
        return _probed_defect(Q)
    Q = np.asarray(Q)
    if Q.ndim < 2 or Q.dtype.kind not in "biufc":
        raise TypeError(
            f"Q is an array of shape {Q.shape} and dtype {Q.dtype}; pass a LowRankUnitary, "
            "a numeric (…, n, n) array or a LinearOperator"
        )
    if not np.isfinite(Q).all():
        raise ValueError("Q contains NaN or infinity; it must be finite")
    defect = np.empty(Q.shape[:-2])
    for index in np.ndindex(*defect.shape):
        defect[index] = _dense_defect(Q[index])
    return _plain(defect)


def _dense_defect(Q: np.ndarray) -> float:
    """The defect of one dense matrix."""
    X = _embedded(Q)
    D = _exact.add(_exact.product(X.T, X), _exact.pair(-np.eye(X.shape[1])))
    return _two_norm(D[0])


def _low_rank_defect(Q: LowRankUnitary) -> Any:
    """The defects of I + F C Fᴴ, element by element."""
    C = _inputs.array("Q.core", Q.core)
    defect = np.empty(C.shape[:-2])
    grams: dict[tuple[int, ...], tuple[_exact.Pair, np.ndarray, np.ndarray]] = {}
    frames = Q.frame(0, 0).shape[:-2]
    lead = len(defect.shape) - len(frames)
    for index in np.ndindex(*defect.shape):
        element = tuple(0 if n == 1 else i for i, n in zip(index[lead:], frames, strict=True))
        if element not in grams:
            grams = {element: _exact_gram(Q, element)} if len(grams) > 64 else grams
            grams[element] = _exact_gram(Q, element)
        G, root, d = grams[element]
        D = _defect_core(d[:, None] * _embedded(C[index]) * d, G)
        defect[index] = _two_norm(root @ D @ root.T)
    return _plain(defect)


def _exact_gram(
    Q: LowRankUnitary, element: tuple[int, ...]
) -> tuple[_exact.Pair, np.ndarray, np.ndarray]:
    """FᴴF of one element as a pair, a root K with FᴴF ≈ KᴴK, and powers of two d, all of F/d.

    Without the scaling the slices of graded columns would miss the short ones.
    """
    p, n = Q.core.shape[-1], Q.shape[-1]
    width = 2 * p if Q.dtype.kind == "c" else p
    G = _exact.pair(np.zeros((width, width)))
    step = LONGEST
    for lo in range(0, n, step):
        F = _embedded_columns(Q.frame(lo, lo + step)[element])
        G = _exact.add(G, _exact.product(F.T, F))
    if Q.dtype.kind == "c":
        G = _from_columns(G)
    size = np.diagonal(G[0])
    d = np.exp2(np.rint(0.5 * np.log2(np.where(size > 0, size, 1))))
    scaled = G[0] / d[:, None] / d, G[1] / d[:, None] / d
    values, vectors = np.linalg.eigh(scaled[0])
    return scaled, np.sqrt(np.maximum(values, 0))[:, None] * vectors.T, d


def _defect_core(C: np.ndarray, G: _exact.Pair) -> np.ndarray:
    """C + Cᵀ + CᵀGC with twice the working precision."""
    high, low = _exact.product(C.T, G[0])
    low = low + C.T @ G[1]
    D = _exact.add(_exact.product(high, C), _exact.pair(low @ C))
    D = _exact.add(D, _exact.pair(C))
    return _exact.add(D, _exact.pair(C.T))[0]


def _embedded(C: np.ndarray) -> np.ndarray:
    """A matrix in double precision; a complex one as [[Re, −Im], [Im, Re]]."""
    if C.dtype.kind != "c":
        return C.astype(np.float64)
    re, im = C.real.astype(np.float64), C.imag.astype(np.float64)
    return np.block([[re, -im], [im, re]])


def _embedded_columns(F: np.ndarray) -> np.ndarray:
    """Rows of a frame in double precision; complex ones as [Re, Im]."""
    if F.dtype.kind != "c":
        return F.astype(np.float64)
    return np.concatenate([F.real, F.imag], axis=-1).astype(np.float64)


def _from_columns(G: _exact.Pair) -> _exact.Pair:
    """The embedded FᴴF from the products of real and imaginary columns."""
    p = G[0].shape[0] // 2
    re = _exact.add((G[0][:p, :p], G[1][:p, :p]), (G[0][p:, p:], G[1][p:, p:]))
    im = _exact.add((G[0][:p, p:], G[1][:p, p:]), (-G[0][p:, :p], -G[1][p:, :p]))
    high, low = (np.block([[a, -b], [b, a]]) for a, b in zip(re, im, strict=True))
    return high, low


def _two_norm(a: np.ndarray) -> float:
    """The 2-norm of one matrix."""
    return float(np.linalg.norm(a, 2)) if a.size else 0.0


def _probed_defect(Q: Any) -> Estimate:
    """A lower estimate of the defect of a linear operator."""
    n = Q.shape[1]
    rng = np.random.default_rng(0)
    complex_kind = np.dtype(Q.dtype).kind == "c" if Q.dtype is not None else False
    best = 0.0
    for _ in range(PROBES):
        x = rng.standard_normal(n)
        x = x + 1j * rng.standard_normal(n) if complex_kind else x
        for _ in range(POWER_STEPS):
            size = np.linalg.norm(x)
            if not size > 0:
                break
            x = x / size
            x = Q.rmatvec(Q.matvec(x)) - x
            best = max(best, float(np.linalg.norm(x)))
    return Estimate(best)


def basis_condition(U: Any, V: Any) -> Any:
    """The condition number κ₂([U V]), from Householder QR and so without squaring it.

    Parameters
    ----------
    U, V : array_like, (n,) or (…, n, r)

    Returns
    -------
    float or ndarray
        σ_max/σ_min of the n × 2r matrix; infinite where a singular value, as computed, is zero. A
        singular value is known to rounding of the largest: 1/u or more says singular, not how.

    Raises
    ------
    ValueError, TypeError
        As `skew_expm_multiply`.

    Notes
    -----
    O(n m²) time, streamed over the rows.

    Examples
    --------
    >>> from lowrank_expm import verify
    >>> verify.basis_condition([2.0, 0.0, 0.0], [0.0, 1.0, 0.0])
    2.0
    """
    S = _generator(U, V)
    frame = Frame((S.U, S.V))
    R = triangular_factor(frame, _working(S))
    if not np.isfinite(R).all():
        S.angles()  # raises, and says which argument is not finite
    if not R.shape[-1] or not R.shape[-2]:
        return _plain(np.ones(R.shape[:-2]))
    s = np.linalg.svd(R, compute_uv=False).astype(float)
    with np.errstate(over="ignore"):
        found = np.full(s.shape[:-1], np.inf)
        return _plain(np.divide(s[..., 0], s[..., -1], out=found, where=s[..., -1] > 0))


def _generator(U: Any, V: Any, method: Method = "auto") -> LowRankSkew:
    """The generator of NumPy arrays; those of other libraries are refused."""
    return LowRankSkew(_inputs.array("U", U), _inputs.array("V", V), method=method)


def _working(S: LowRankSkew) -> np.dtype:
    """The dtype to compute in for a generator."""
    return np.result_type(S.dtype, np.float32)


def expm_condition(S: LowRankSkew, t: Any = 1.0) -> Any:
    """The relative condition number of the matrix exponential at tS in the Frobenius norm.

    Parameters
    ----------
    S : LowRankSkew
    t : float or 1-D array_like, optional

    Returns
    -------
    float or ndarray
        |t| ‖S‖_F / √n.

    Notes
    -----
    The condition number is ‖L‖ ‖A‖_F / ‖eᴬ‖_F with L the Fréchet derivative (Higham, Functions
    of Matrices, section 10.2, doi:10.1137/1.9780898717778). For a skew-Hermitian A with
    eigenvalues iλⱼ, L multiplies by divided differences of modulus
    \\|sinc((λⱼ − λₖ)/2)\\| ≤ 1, with equality for j = k: ‖L‖ = 1, and ‖eᴬ‖_F = √n.

    Examples
    --------
    >>> from lowrank_expm import LowRankSkew, verify
    >>> S = LowRankSkew([3.0, 0.0], [0.0, 1.0])
    >>> round(verify.expm_condition(S), 12)
    3.0
    """
    if not isinstance(S, LowRankSkew):
        raise TypeError(f"S is a {type(S).__name__}; pass a LowRankSkew")
    t = np.abs(_inputs.times(t).values.astype(float))
    norm = np.asarray(S.norm("fro"), dtype=float)
    n = S.shape[-1]
    value = t.reshape(t.shape + (1,) * norm.ndim) * norm / math.sqrt(n) if n else norm * 0
    return _plain(np.asarray(value))


@dataclass(frozen=True)
class Report:
    """What `check` found; `str(report)` is a table.

    Attributes
    ----------
    passed : bool
        Whether defect, norm drift and inverse error, and the errors of the derivatives if they
        were tried, are at rounding level.
    defect : float
        ‖QᴴQ − I‖₂, measured.
    defect_bound : float
        What the certificate promised.
    norm_drift : float
        The largest |‖Qb‖/‖b‖ − 1| over the columns b of B.
    inverse_error : float
        The largest ‖QᴴQb − b‖/‖b‖ over the columns.
    angle : float
        |t| ‖S‖₂ in radians.
    basis_condition : float
        κ₂([U V]).
    expm_condition : float
        The relative condition number of exp at tS.
    route : str
        "gram", "qr", "direct", or "gram, qr" for a batch that took both.
    limit : float
        80 √m u: what defect and norm drift may be (twice that for the inverse error).
    n, r : int
        Size of the problem.
    dtype : str
        The dtype of the operator.
    adjoint_error : float or None
        How far the derivatives forward and reverse are from adjoint, relatively; None where that
        was not asked for, as below.
    difference_error : float or None
        The relative distance of the forward derivative from central differences.
    adjoint_limit, difference_limit : float or None
        What these may be: 10³ ρu and 10³ (ρu + (ρ2⁻⁵³)^⅔) with ρ = max(1, |t| Σ ‖uⱼ‖‖vⱼ‖). A limit
        of 1 or more could not tell a right derivative from a wrong one: at such an angle the
        dtype does not decide, the table says "undecidable", and `passed` says nothing about it.

    Examples
    --------
    >>> from lowrank_expm import verify
    >>> report = verify.check([0.0, 2.0, 0.0], [1.0, 0.0, 0.0])
    >>> report.passed, report.angle, report.basis_condition
    (True, 2.0, 2.0)
    """

    passed: bool
    defect: float
    defect_bound: float
    norm_drift: float
    inverse_error: float
    angle: float
    basis_condition: float
    expm_condition: float
    route: str
    limit: float
    n: int
    r: int
    dtype: str
    adjoint_error: float | None = None
    difference_error: float | None = None
    adjoint_limit: float | None = None
    difference_limit: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """The fields as a dictionary of Python scalars.

        Returns
        -------
        dict

        Examples
        --------
        >>> from lowrank_expm import verify
        >>> verify.check([0.0, 2.0, 0.0], [1.0, 0.0, 0.0]).to_dict()["route"]
        'gram'
        """
        return asdict(self)

    def __str__(self) -> str:
        verdict = "passed" if self.passed else "FAILED"
        head = (
            f"exp(tS) with n = {self.n}, r = {self.r}, {self.dtype}, route {self.route}: {verdict}"
        )
        measured = [
            ("orthogonality defect", self.defect, self.limit),
            ("norm drift", self.norm_drift, self.limit),
            ("inverse error", self.inverse_error, 2 * self.limit),
            ("derivatives: adjointness", self.adjoint_error, self.adjoint_limit),
            ("derivatives: differences", self.difference_error, self.difference_limit),
        ]
        lines = [head, f"  {'measured':<34}{'value':>10}  {'allowed':>10}"]
        for name, value, limit in measured:
            if value is None or limit is None:
                continue
            mark = "ok" if value <= limit else "TOO LARGE"
            if name.startswith("derivatives") and limit >= _derivative_check.UNDECIDABLE:
                mark = "undecidable"
            lines.append(f"  {name:<34}{value:>10.2e}  {limit:>10.2e}  {mark}")
        known = [
            ("defect bound of the certificate", self.defect_bound),
            ("largest angle |t| ‖S‖ (radians)", self.angle),
            ("condition of the basis [U V]", self.basis_condition),
            ("condition of exp at tS", self.expm_condition),
        ]
        beyond = 2.0 / float(np.finfo(self.dtype).eps)  # known to rounding: it says no more
        for name, value in known:
            text = "singular" if "basis" in name and value >= beyond else f"{value:.2e}"
            lines.append(f"  {name:<34}{text:>10}")
        return "\n".join(lines)


def check(
    U: Any,
    V: Any,
    B: Any = None,
    t: Any = 1.0,
    *,
    method: Method = "auto",
    derivatives: bool = False,
) -> Report:
    """Verify exp(t(U Vᴴ − V Uᴴ)) on the caller's own data.

    Parameters
    ----------
    U, V : array_like, (n,) or (…, n, r)
    B : array_like, (n,) or (…, n, k), optional
        Vectors to test with; two random ones from a fixed seed by default.
    t : float or 1-D array_like, optional
    method : {"auto", "gram", "qr", "direct"}, optional
    derivatives : bool, optional
        Whether to try the derivatives too, in a random direction: that forward and reverse are
        adjoint, and that forward agrees with central differences in double precision. What may be
        said of them depends on the angle; see `Report`.

    Returns
    -------
    Report
        The worst over a batch or grid.

    Raises
    ------
    ValueError, TypeError
        As `skew_expm_multiply`.

    Notes
    -----
    O(n m²) time, a few passes over the rows; memory for a few vectors of length n, and for a few
    arrays of the size of U and V with `derivatives`.

    Examples
    --------
    >>> import numpy as np
    >>> from lowrank_expm import verify
    >>> rng = np.random.default_rng(0)
    >>> report = verify.check(rng.standard_normal((100, 3)), rng.standard_normal((100, 3)))
    >>> report.passed, report.route
    (True, 'gram')
    """
    S = _generator(U, V, method)
    Q = S.expm(t)
    n, r = S.U.shape[-2:]
    B = _probes(S) if B is None else _inputs.vectors(B, n)[0]
    drift, inverse = _there_and_back(Q, B)
    c = Q.certificate
    u = float(np.finfo(Q.dtype).eps) / 2
    limit = ALLOWED * math.sqrt(max(2 * r if "direct" not in c.route else n, 1)) * u
    worst = {
        "defect": _worst(orthogonality_defect(Q)),
        "norm_drift": drift,
        "inverse_error": inverse,
    }
    found = _derivative_check.measure(S, B, t, Q.dtype) if derivatives else None
    return Report(
        passed=worst["defect"] <= limit
        and worst["norm_drift"] <= limit
        and worst["inverse_error"] <= 2 * limit
        and (found is None or found.passed),
        defect_bound=_worst(c.defect_bound),
        angle=_worst(c.angle),
        basis_condition=_worst(basis_condition(S.U, S.V)),
        expm_condition=_worst(expm_condition(S, t)),
        route=", ".join(sorted({str(name) for name in np.ravel(c.route)})),
        limit=limit,
        n=n,
        r=r,
        dtype=str(Q.dtype),
        **worst,
        **(found._asdict() if found else {}),
    )


def _there_and_back(Q: LowRankUnitary, B: np.ndarray) -> tuple[float, float]:
    """The worst norm drift and inverse error over the columns of B, a few columns at a time."""
    drift = inverse = 0.0
    columns = max(1, SCRATCH // max(1, math.prod(B.shape[:-1])))
    for j in range(0, B.shape[-1], columns):
        b = B[..., j : j + columns]
        y = Q @ b
        before, after = _column_norms(b), _column_norms(y)
        safe = np.where(before > 0, before, 1)
        drift = float(np.maximum(drift, _worst(np.abs(after / safe - (before > 0)))))
        back = Q.H @ y
        back -= b
        inverse = float(np.maximum(inverse, _worst(_column_norms(back) / safe)))
    return drift, inverse


def _probes(S: LowRankSkew) -> np.ndarray:
    """Two random vectors of a generator's dtype."""
    rng = np.random.default_rng(0)
    B = rng.standard_normal((S.shape[-1], 2))
    if S.dtype.kind == "c":
        B = B + 1j * rng.standard_normal(B.shape)
    return B.astype(S.dtype)


def _column_norms(a: np.ndarray) -> np.ndarray:
    """The column lengths in double precision, summed in two levels to keep rounding small."""
    parts = [length(a[..., lo : lo + LONGEST, :], axis=-2) for lo in range(0, a.shape[-2], LONGEST)]
    if not parts:
        return np.zeros((*a.shape[:-2], a.shape[-1]))
    return length(np.stack(parts, axis=-1), axis=-1)


def _worst(a: Any) -> float:
    """The largest entry, 0 for an empty array."""
    return float(np.max(a, initial=0.0))


def _plain(a: np.ndarray) -> Any:
    """A Python float for one operator, an array for a batch."""
    return float(a) if a.ndim == 0 else a
