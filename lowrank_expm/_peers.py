"""Other ways to compute exp(U Vᵀ − V Uᵀ) b, as somebody without this library would write them.

Real arrays only. The benchmark and the demonstration set them beside the library; nothing else
uses them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

TIGHT = 1e-14  # what iterations are asked for, relative


def dense(U: Array, V: Array, b: Array) -> Array:
    """scipy.linalg.expm of the n × n matrix."""
    from scipy.linalg import expm

    return expm(generator(U, V)) @ b


def generator(U: Array, V: Array) -> Array:
    """S itself, n × n."""
    M = U @ np.matrix_transpose(V)
    return M - np.matrix_transpose(M)


def plain_gram(U: Array, V: Array, b: Array) -> Array:
    """The Gram form in plain NumPy, its core by scipy.linalg.expm; with or without batch axes."""
    X = np.concatenate([U, V], axis=-1)
    Xt = np.matrix_transpose(X)
    G, T = Xt @ X, Xt @ b
    return b + X @ _phi1_action(apply_j(G), apply_j(T))


def apply_j(M: Array) -> Array:
    """J @ M with J = [[0, I], [−I, 0]]."""
    r = M.shape[0] // 2 if M.ndim == 1 else M.shape[-2] // 2
    if M.ndim == 1:
        return np.concatenate([M[r:], -M[:r]])
    return np.concatenate([M[..., r:, :], -M[..., :r, :]], axis=-2)


def _phi1_action(A: Array, T: Array) -> Array:
    """φ₁(A) T, the corner of exp [[A, T], [0, 0]]."""
    from scipy.linalg import expm

    right = T[:, None] if T.ndim == 1 else T
    m, k = right.shape[-2:]
    M = np.zeros((*A.shape[:-2], m + k, m + k), A.dtype)
    M[..., :m, :m], M[..., :m, m:] = A, right
    Z = expm(M)[..., :m, m:]
    return Z[:, 0] if T.ndim == 1 else Z


def orthonormal_basis(U: Array, V: Array, b: Array) -> Array:
    """LAPACK's QR of [U V] and scipy.linalg.expm of the small matrix in that basis."""
    from scipy.linalg import expm

    Q, R = np.linalg.qr(np.hstack([U, V]))
    K = R @ apply_j(R.T)
    return b + Q @ ((expm(K) - np.eye(len(K))) @ (Q.T @ b))


def arnoldi(U: Array, V: Array, b: Array) -> Array:
    """Arnoldi from b, stopped at 2r + 1 vectors, where the Krylov space of S is complete.

    Full orthogonalisation by classical Gram-Schmidt, done twice.
    """
    from scipy.linalg import expm

    depth = 2 * U.shape[1] + 1
    Q, H = np.empty((depth, len(b))), np.zeros((depth, depth))
    beta = np.linalg.norm(b)
    Q[0] = b / beta
    for j in range(depth):
        w = U @ (V.T @ Q[j]) - V @ (U.T @ Q[j])
        size = np.linalg.norm(w)
        for _ in range(2):
            h = Q[: j + 1] @ w
            w -= h @ Q[: j + 1]
            H[: j + 1, j] += h
        rest = np.linalg.norm(w)
        if j + 1 == depth or rest <= TIGHT * size:
            break
        H[j + 1, j], Q[j + 1] = rest, w / rest
    return expm(H[: j + 1, : j + 1])[:, 0] @ Q[: j + 1] * beta


def linear_operator(U: Array, V: Array) -> Any:
    """S as SciPy's LinearOperator, in its low-rank form."""
    from scipy.sparse.linalg import LinearOperator

    def multiply(x: Array) -> Array:
        return U @ (V.T @ x) - V @ (U.T @ x)

    def multiply_adjoint(x: Array) -> Array:
        return -multiply(x)

    return LinearOperator(
        shape=(len(U), len(U)),
        dtype=U.dtype,
        matvec=multiply,
        rmatvec=multiply_adjoint,
        matmat=multiply,
        rmatmat=multiply_adjoint,
    )


def scipy_expm_multiply(U: Array, V: Array, b: Array) -> Array:
    """scipy.sparse.linalg.expm_multiply on the low-rank LinearOperator."""
    from scipy.sparse.linalg import expm_multiply

    return expm_multiply(linear_operator(U, V), b, traceA=0.0)


def has_scipy_krylov() -> bool:
    """Whether this SciPy has funm_multiply_krylov (1.16 does)."""
    import scipy.sparse.linalg

    return hasattr(scipy.sparse.linalg, "funm_multiply_krylov")


def scipy_krylov(U: Array, V: Array, b: Array) -> Array:
    """scipy.sparse.linalg.funm_multiply_krylov on the low-rank LinearOperator."""
    from scipy.linalg import expm
    from scipy.sparse.linalg import funm_multiply_krylov

    # A restart length beyond 2r + 1: the space is complete before the first restart.
    m = min(len(b), 2 * U.shape[1] + 2)
    return funm_multiply_krylov(expm, linear_operator(U, V), b, rtol=TIGHT, restart_every_m=m)
