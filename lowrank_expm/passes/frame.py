"""The frame F of a unitary I + F C Fᴴ, described but not stored."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .._array import Array


@dataclass(frozen=True)
class Frame:
    """F = [columns] diag(scale) R₁⁻¹ R₂⁻¹ …, of shape (…, n, m).

    `columns` are arrays (…, n, r) side by side; `scale` is (…, m), powers of two; each of the
    `factors` is upper triangular, (…, m, m), with a real positive diagonal. Rows of F are
    computed where they are needed, by the same operations in every pass, so that every pass sees
    the same numbers.
    """

    columns: tuple[Array, ...]
    scale: Array | None = None
    factors: tuple[Array, ...] = ()

    @property
    def rows(self) -> int:
        """The length n of the long axis."""
        return int(self.columns[0].shape[-2])

    @property
    def width(self) -> int:
        """The number m of columns."""
        return sum(int(a.shape[-1]) for a in self.columns)

    @property
    def batch(self) -> tuple[int, ...]:
        """The batch shape of the columns."""
        return np.broadcast_shapes(*(tuple(a.shape[:-2]) for a in self.columns))

    @property
    def count(self) -> int:
        """The number of batch elements."""
        return math.prod(self.batch)
