"""Orthogonal attention: exp(α/√d (Q Kᴴ − K Qᴴ)) V on arrays of attention's shapes.

A thin adapter around `skew_expm_multiply`: it reshapes, calls, and reshapes. The
`orthogonal_initialization` beside it draws weights with which a stack of such layers starts
close to an orthogonal map.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from . import _foreign, _inputs
from ._array import library, namespace
from .skew import skew_expm_multiply

__all__ = [
    "AttentionWeights",
    "orthogonal_attention",
    "orthogonal_attention_packed",
    "orthogonal_initialization",
]

# What the library's own messages call the arguments here.
_NAMES = {"U": "q", "V": "k", "B": "v", "t": "alpha"}
_FLOATING = ("real floating", "complex floating")


def orthogonal_attention(
    q: Any, k: Any, v: Any, *, alpha: Any = 1.0, scale: float | None = None, mask: Any = None
) -> Any:
    """Mix tokens by the orthogonal matrix exp(alpha·scale·(q kᴴ − k qᴴ)).

    Parameters
    ----------
    q, k : array, (…, n, d)
        Queries and keys of n tokens; batches and heads lead and broadcast.
    v : array, (…, n, e)
        Values; e may differ from d.
    alpha : float or array, optional
        How far to turn: a number, or an array that broadcasts against the leading axes, such as
        one number a head, (h,) for q of shape (b, h, n, d).
    scale : float, optional
        1/√d by default, as in softmax attention.
    mask : boolean array, (…, n), optional
        True where a token takes part. The others come back unchanged and influence none,
        whatever their rows hold, and the operator on the rest is what it would be without them.
        It broadcasts like alpha: a mask (b, n) for q of shape (b, h, n, d) is ``mask[:, None]``.

    Returns
    -------
    array, (…, n, e)
        In the library, on the device and in the promoted dtype of the arguments.

    Raises
    ------
    ValueError
        Shapes that do not fit; NaN or infinity in a token that takes part; overflow.
    TypeError
        A mask that is not boolean, a complex alpha, arrays that the library does not support.

    See Also
    --------
    orthogonal_attention_packed : the same for [q k v] in one array.
    lowrank_expm.skew_expm_multiply : the operation underneath.

    Notes
    -----
    The operator is orthogonal to rounding: it keeps the norm of every column of v and the rank
    of the token matrix. Nothing of size n × n is formed for n > 2d: O(n (2d)² + n d e + d³) time
    a head. A number alpha becomes the angle t, and q is not copied; an array alpha multiplies q.
    The method is from Zhang and Martens, "Orthogonal Self-Attention" (2026, arXiv:2602.05996).

    Examples
    --------
    >>> import numpy as np
    >>> from lowrank_expm.attention import orthogonal_attention
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 8, 100, 4))     # 8 heads, 100 tokens, d = 4
    >>> y = orthogonal_attention(q, k, v, alpha=0.1)
    >>> y.shape
    (8, 100, 4)
    >>> bool(np.allclose(np.linalg.norm(y, axis=-2), np.linalg.norm(v, axis=-2)))
    True
    """
    return _attend(skew_expm_multiply, q, k, v, alpha, scale, mask)


def _attend(
    multiply: Callable[..., Any], q: Any, k: Any, v: Any, alpha: Any, scale: Any, mask: Any
) -> Any:
    """Attention by any function like `skew_expm_multiply`."""
    _check_shapes(q, k, v)
    scale = _checked_scale(alpha, scale, q)
    keep = None if mask is None else _keep(mask, q, k, v)
    if keep is not None:
        q, k, given, v = _kept(keep, q), _kept(keep, k), v, _kept(keep, v)
    try:
        y = _turned(multiply, q, k, v, alpha, scale)
    except (ValueError, TypeError) as error:
        if type(error) not in (ValueError, TypeError):  # a library's own
            raise
        raise type(error)(_renamed(str(error))) from None
    return y if keep is None else namespace(y, given).where(keep, y, given)


def _turned(multiply: Callable[..., Any], q: Any, k: Any, v: Any, alpha: Any, scale: float) -> Any:
    """The product; an array alpha counts in the precision to compute in, not in its own."""
    if library(alpha) != library(q) or not hasattr(alpha, "shape"):
        return multiply(q, k, v, alpha * scale)
    xp, dtype, work = _precision(q, k, v, alpha)
    factor = xp.astype(alpha, work) * scale
    if not alpha.ndim:
        return xp.astype(multiply(q, k, v, factor), dtype, copy=False)
    wide = xp.result_type(q.dtype, work) if xp.isdtype(q.dtype, _FLOATING) else work
    q = factor[..., None, None] * xp.astype(q, wide, copy=False)
    return xp.astype(multiply(q, k, v, 1.0), dtype, copy=False)


def _precision(q: Any, k: Any, v: Any, alpha: Any) -> tuple[Any, Any, Any]:
    """The namespace, the result's dtype, and the real one to compute in."""
    given = {"U": q, "V": k, "B": v}
    if library(q):
        xp, _ = _foreign.same_place(given, alpha)
        dtype = _foreign.promoted(xp, q, k, v, alpha)
        return xp, dtype, _foreign.working(xp, dtype)
    arrays = [_inputs.array(name, a) for name, a in (given | {"t": alpha}).items()]
    dtype = _inputs.floating(*arrays)
    return namespace(arrays[0]), dtype, _inputs.real_part(dtype)


def orthogonal_attention_packed(
    qkv: Any,
    *,
    head_dim: int | None = None,
    alpha: Any = 1.0,
    scale: float | None = None,
    mask: Any = None,
) -> Any:
    """Orthogonal attention for queries, keys and values that are columns of one array.

    Parameters
    ----------
    qkv : array, (…, n, 2d + e)
        The columns of q, then those of k, then those of v.
    head_dim : int, optional
        d; by default a third of the columns.
    alpha, scale, mask
        As in `orthogonal_attention`.

    Returns
    -------
    array, (…, n, e)

    Raises
    ------
    ValueError, TypeError
        As `orthogonal_attention`; also for a number of columns that does not fit.

    Notes
    -----
    The three parts are views: nothing is copied, unless there is a mask or an array alpha.

    Examples
    --------
    >>> import numpy as np
    >>> from lowrank_expm.attention import orthogonal_attention_packed
    >>> qkv = np.random.default_rng(0).standard_normal((100, 12))
    >>> orthogonal_attention_packed(qkv, alpha=0.1).shape
    (100, 4)
    """
    width = _shape("qkv", qkv)[-1]
    if head_dim is None and width % 3:
        raise ValueError(
            f"qkv has {width} columns, which is not three times a head_dim; pass head_dim"
        )
    d = width // 3 if head_dim is None else head_dim
    if not 0 <= 2 * d <= width:
        raise ValueError(f"qkv has {width} columns, too few for head_dim = {d} twice")
    q, k, v = _split(qkv, d)
    return orthogonal_attention(q, k, v, alpha=alpha, scale=scale, mask=mask)


def _split(qkv: Any, d: int) -> tuple[Any, Any, Any]:
    """Views of the three parts; torch puts cotangents of a split together in one copy."""
    if library(qkv) == "torch":
        return qkv.split([d, d, qkv.shape[-1] - 2 * d], dim=-1)
    return qkv[..., :d], qkv[..., d : 2 * d], qkv[..., 2 * d :]


def _shape(name: str, a: Any) -> tuple[int, ...]:
    """The shape of an array of two axes or more."""
    shape = getattr(a, "shape", None)
    if shape is None:
        raise TypeError(f"{name} is a {type(a).__name__}; pass an array")
    if len(shape) < 2:
        raise ValueError(f"{name} has shape {tuple(shape)}; it must be (…, n, d)")
    return tuple(shape)


def _check_shapes(q: Any, k: Any, v: Any) -> None:
    """Refuse queries, keys and values that do not belong together."""
    shapes = _shape("q", q), _shape("k", k), _shape("v", v)
    if shapes[0][-2:] != shapes[1][-2:]:
        raise ValueError(
            f"q has shape {shapes[0]} and k has shape {shapes[1]}; orthogonal attention is "
            "self-attention: both must be (…, n, d) with the same n and d"
        )
    if shapes[2][-2] != shapes[0][-2]:
        raise ValueError(
            f"v has shape {shapes[2]} and q has shape {shapes[0]}; both need a row for each token"
        )
    _broadcast("q, k and v of shapes {}, {} and {}".format(*shapes), *(s[:-2] for s in shapes))


def _broadcast(what: str, *batches: tuple[int, ...]) -> tuple[int, ...]:
    """The broadcast batch shape."""
    try:
        return np.broadcast_shapes(*batches)
    except ValueError:
        raise ValueError(f"the leading axes of {what} do not broadcast") from None


def _checked_scale(alpha: Any, scale: float | None, q: Any) -> Any:
    """The scale, with alpha a number or an array over the leading axes."""
    scale = 1 / math.sqrt(max(1, q.shape[-1])) if scale is None else scale
    if not isinstance(scale, int | float) and getattr(scale, "shape", None) != ():
        raise TypeError(f"scale is a {type(scale).__name__}; pass a number")
    if not isinstance(alpha, int | float | complex) and not hasattr(alpha, "shape"):
        raise TypeError(f"alpha is a {type(alpha).__name__}; pass a number or an array")
    shape = tuple(getattr(alpha, "shape", ()))
    if shape:
        _same_library("alpha", alpha, q)
    if isinstance(alpha, complex) or "complex" in str(getattr(alpha, "dtype", "")):
        raise TypeError("alpha is complex, so the result would not be orthogonal; pass a real one")
    if not all(math.isfinite(x) for x in (alpha, scale) if isinstance(x, int | float)):
        raise ValueError(f"alpha is {alpha} and scale is {scale}; both must be finite")
    _broadcast(f"alpha of shape {shape} and q of shape {tuple(q.shape)}", shape, q.shape[:-2])
    return scale


def _keep(mask: Any, q: Any, k: Any, v: Any) -> Any:
    """The mask with a column axis."""
    dtype = str(getattr(mask, "dtype", type(mask).__name__))
    if "bool" not in dtype or not hasattr(mask, "shape"):
        raise TypeError(
            f"mask is of type {dtype}; it must be a boolean array, True where a token takes part"
        )
    _same_library("mask", mask, q)
    shape, n = tuple(mask.shape), q.shape[-2]
    if not shape or shape[-1] != n:
        raise ValueError(f"mask has shape {shape}; with n = {n} tokens it must be (…, {n})")
    batches = (tuple(a.shape[:-2]) for a in (q, k, v))
    _broadcast(f"mask of shape {shape} and q, k and v", shape[:-1], *batches)
    return mask[..., None]


def _same_library(name: str, a: Any, q: Any) -> None:
    """Refuse an array that is not of q's library."""
    if library(a) != library(q):
        raise TypeError(
            f"{name} is a {type(a).__module__}.{type(a).__name__} and q is a "
            f"{type(q).__module__}.{type(q).__name__}; pass arrays of one library"
        )


def _kept(keep: Any, a: Any) -> Any:
    """The rows to keep, and zeros for the others even where they hold NaN."""
    xp = namespace(keep, a)
    return xp.where(keep, a, xp.zeros_like(a[..., :1, :1]))


def _renamed(message: str) -> str:
    """A message about U, V, B and t in the terms of attention."""
    return re.sub(r"\b[UVBt]\b", lambda found: _NAMES[found.group()], message)


class AttentionWeights(NamedTuple):
    """Weights of one attention layer, applied as x @ weight.T like those of a linear layer.

    Attributes
    ----------
    in_proj_weight : ndarray, (3·embed_dim, embed_dim)
        For each head in turn its rows of W_Qᵀ, W_Kᵀ and W_Vᵀ.
    out_proj_weight : ndarray, (embed_dim, embed_dim)
        W_Oᵀ.

    Examples
    --------
    >>> from lowrank_expm.attention import orthogonal_initialization
    >>> weights = orthogonal_initialization(8, 2, rng=0)
    >>> weights.in_proj_weight.shape, weights.out_proj_weight.shape
    ((24, 8), (8, 8))
    """

    in_proj_weight: np.ndarray
    out_proj_weight: np.ndarray


def orthogonal_initialization(
    embed_dim: int, num_heads: int, *, rng: Any = None, dtype: Any = np.float64
) -> AttentionWeights:
    """Random weights with which orthogonal attention starts close to an orthogonal map.

    Parameters
    ----------
    embed_dim, num_heads : int
        The width of a token, and into how many heads it is split.
    rng : int or numpy.random.Generator, optional
        A seed or a generator.
    dtype : dtype, optional
        Of the weights.

    Returns
    -------
    AttentionWeights

    Raises
    ------
    ValueError
        Where num_heads does not divide embed_dim.

    Notes
    -----
    W_V and W_O are orthogonal, and each head's P = [W_Q W_K] has orthonormal columns; with a single
    head, where they do not fit, W_Q and W_K have, each for itself. All are uniformly distributed
    (Stewart 1980, doi:10.1137/0717034). As d exp(S) is non-expansive, the Jacobian of the layer
    with respect to the tokens X is then an isometry plus a term below 2 ‖P₁ … Pₕ‖₂ α/√d ‖X‖₂²,
    with ‖P₁ … Pₕ‖₂ ≤ √h for h heads; with one head it is below 4 α/√d ‖X‖₂². Cost: one QR of
    embed_dim × 2·head_dim a head and two of embed_dim × embed_dim.

    Examples
    --------
    >>> import numpy as np
    >>> from lowrank_expm.attention import orthogonal_initialization
    >>> w = orthogonal_initialization(32, 4, rng=0)
    >>> w.in_proj_weight.shape, w.out_proj_weight.shape
    ((96, 32), (32, 32))
    >>> head = w.in_proj_weight[:16]                      # [W_Q W_K]ᵀ of the first head
    >>> bool(np.allclose(head @ head.T, np.eye(16)))
    True
    """
    if num_heads < 1 or embed_dim % num_heads:
        raise ValueError(f"embed_dim is {embed_dim}; num_heads = {num_heads} must divide it")
    rng = np.random.default_rng(rng)
    d = embed_dim // num_heads
    blocks = 1 if 2 * d <= embed_dim else 2
    weight = np.empty((num_heads, 3, d, embed_dim), dtype)
    for head in weight:
        parts = [_orthonormal_rows(2 * d // blocks, embed_dim, rng) for _ in range(blocks)]
        head[:2] = np.concatenate(parts).reshape(2, d, embed_dim)
    weight[:, 2] = _orthonormal_rows(embed_dim, embed_dim, rng).reshape(num_heads, d, embed_dim)
    out = _orthonormal_rows(embed_dim, embed_dim, rng)
    return AttentionWeights(weight.reshape(3 * embed_dim, embed_dim), out.astype(dtype))


def _orthonormal_rows(rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """Uniformly distributed orthonormal rows."""
    Q, R = np.linalg.qr(rng.standard_normal((columns, rows)))
    return (Q * np.sign(np.diagonal(R))).T
