"""This library's operators as SciPy's."""

from __future__ import annotations

from typing import Any

import numpy as np


def aslinearoperator(A: Any) -> Any:
    """A `scipy.sparse.linalg.LinearOperator` of an operator that has `@` and an adjoint `H`."""
    from scipy.sparse.linalg import LinearOperator

    if A.ndim != 2:
        raise ValueError(
            f"a SciPy LinearOperator is one matrix, this is a batch of shape {A.shape}; "
            "make one generator for each element"
        )
    return LinearOperator(
        A.shape,
        matvec=lambda x: A @ np.ravel(x),
        rmatvec=lambda x: A.H @ np.ravel(x),
        matmat=lambda X: A @ X,
        rmatmat=lambda X: A.H @ X,
        dtype=A.dtype,
    )
