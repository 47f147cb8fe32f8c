"""Orthogonal attention over a sequence that is split between the processes of a torch group.

Every process holds some rows of the sequence, and all of the weights. What the rows of others
contribute is one m × (m + e) array a head, m = 2d: one all-reduce in the forward and one in the
backward pass. Every process sees the same sums and so decides in the same way. Needs PyTorch
(`pip install "lowrank_expm[torch]"`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from . import _foreign, _portable
from ._array import adjoint, eye
from ._foreign import Arguments
from ._portable import scale_of
from ._tangent import Framed, Gram
from .attention import _attend
from .core import spectral
from .core.exponential import apply_j, skew_of
from .passes import Frame, portable_passes

try:
    import torch
    from torch import distributed
    from torch.nn import functional
except ImportError as error:
    raise ImportError(
        "lowrank_expm.distributed needs PyTorch; install it with: pip install 'lowrank_expm[torch]'"
    ) from error

__all__ = ["orthogonal_attention"]


def orthogonal_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    alpha: Any = 1.0,
    scale: float | None = None,
    mask: torch.Tensor | None = None,
    group: Any = None,
) -> torch.Tensor:
    """`attention.orthogonal_attention` over all rows that the processes of a group hold.

    Parameters
    ----------
    q, k : Tensor, (…, n, d)
        This process's rows of the queries and keys; n may differ between processes, and be 0.
    v : Tensor, (…, n, e)
        Its rows of the values.
    alpha, scale
        As in `attention.orthogonal_attention`, and the same in every process.
    mask : boolean Tensor, (…, n), optional
        True for the rows here that take part.
    group : torch.distributed.ProcessGroup, optional
        The processes that share the sequence; the default group if None.

    Returns
    -------
    Tensor, (…, n, e)
        This process's rows of the result.

    Raises
    ------
    ValueError
        As `attention.orthogonal_attention`; in every process at once where it is for the numbers.

    Notes
    -----
    The core is computed by every process from the same sums. Gradients of q, k and v are those
    of the sum of all processes' losses; those of alpha, and of weights in front, are this
    process's part, to be added up over the group as in data parallelism. The route is "gram";
    where its certificate is not to be trusted, or squares leave the range of the dtype, it is
    "qr", as in one process: the triangular factors of all processes are gathered and factored
    again (Benson et al. 2013, doi:10.1109/BigData.2013.6691583), with two small all-reduces.
    Every process must call backward, also one whose rows do not enter its loss: the others wait
    for it. There are no second derivatives.

    Examples
    --------
    With one process; more start by `torchrun`:

    >>> import tempfile, torch
    >>> from torch import distributed
    >>> from lowrank_expm.distributed import orthogonal_attention
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     distributed.init_process_group(
    ...         "gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1
    ...     )
    ...     q, k, v = torch.randn(3, 8, 100, 4)
    ...     orthogonal_attention(q, k, v, alpha=0.1).shape
    ...     distributed.destroy_process_group()
    torch.Size([8, 100, 4])
    """
    for name, a in (("q", q), ("k", k), ("v", v)):
        if not isinstance(a, torch.Tensor):
            raise TypeError(f"{name} is a {type(a).__name__}; pass a torch tensor")
    return _attend(partial(_multiply, group), q, k, v, alpha, scale, mask)


@torch.compiler.disable  # it communicates, and decides by what it hears
def _multiply(
    group: Any, U: torch.Tensor, V: torch.Tensor, B: torch.Tensor, t: Any
) -> torch.Tensor:
    """exp(t(U Vᴴ − V Uᴴ)) B on rows that are split between processes."""
    batch = torch.broadcast_shapes(U.shape[:-2], V.shape[:-2], B.shape[:-2])
    xp, _ = _foreign.same_place({"U": U, "V": V, "B": B}, t)
    dtype = _foreign.promoted(xp, U, V, B, t)
    work = torch.promote_types(dtype, torch.float32)
    U, V, B = (a.to(work).expand(*batch, -1, -1) for a in (U, V, B))
    U = t * U
    if not (U.shape[-1] and math.prod(batch)):
        return B.to(dtype)
    return _Split.apply(U, V, B, group).to(dtype)


class _Split(torch.autograd.Function):
    """The operation with one all-reduce in each direction."""

    @staticmethod
    def forward(
        ctx: Any, U: torch.Tensor, V: torch.Tensor, B: torch.Tensor, group: Any
    ) -> torch.Tensor:
        """This process's rows of the result."""
        one: Any = torch.ones((), dtype=U.real.dtype, device=U.device)
        a = Arguments(U, V, B, one, B.dtype, tuple(B.shape), False, False)
        solved: Any = _by_gram(a, group) or _by_basis(a, group)
        s, linear, scales = solved
        ctx.save_for_backward(U, V, B)
        ctx.linear, ctx.scales, ctx.group = linear._replace(X=None, B=None), scales, group
        return portable_passes.update(s.frame, s.C @ s.T, B)

    @staticmethod
    def backward(ctx: Any, Ybar: torch.Tensor) -> Any:
        """The cotangents of this process's rows."""
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "a split sequence has no second derivatives; differentiate without create_graph"
            )
        *factors, B = ctx.saved_tensors
        X = Frame(_scaled(factors, ctx.scales))
        linear = ctx.linear._replace(X=X, B=B)
        P = _summed(portable_passes.project(getattr(linear, "F", X), Ybar), ctx.group)
        Ubar, Vbar, Bbar, _ = linear.pulled(Ybar, P)
        return *_scaled((Ubar, Vbar), ctx.scales), Bbar, None


def _summed(a: torch.Tensor, group: Any) -> torch.Tensor:
    """The sum over all processes."""
    a = a.contiguous()
    distributed.all_reduce(a, group=group)
    return a


def _by_gram(a: Arguments, group: Any) -> tuple[Any, Gram, Any] | None:
    """The solution by the Gram matrix and what its derivative needs, where it is to be trusted."""
    X = Frame((a.U, a.V))
    sums: Any = _summed(torch.cat(portable_passes.accumulate(X, a.B), dim=-1), group)
    s: Any = _portable.by_gram(a, sums[..., : X.width], sums[..., X.width :], None)
    if not _portable.examined(a, s)[0]:
        return None
    return s, Gram(X, s.G, s.T, a.t, a.B), None


def _by_basis(a: Arguments, group: Any) -> tuple[Any, Framed, Any]:
    """The same by an orthonormal basis of all rows, for columns that are scaled."""
    scales = _scales(a, group)
    X = Frame(_scaled((a.U, a.V), scales))
    Q, R = _basis(torch.cat(X.columns, dim=-1), group)
    s: Any = _portable.by_basis(a, Q, R, _summed(adjoint(Q) @ a.B, group), None)
    if not _portable.examined(a, s)[0]:
        raise ValueError("the result overflows; scale t, U, V or B down, or use a wider dtype")
    spectrum = spectral.spectrum(skew_of(R))
    return s, Framed(X, s.frame, eye(R), apply_j(adjoint(R)), spectrum, s.T, a.t, a.B), scales


def _scaled(factors: Sequence[torch.Tensor], scales: Any) -> tuple[torch.Tensor, ...]:
    """U and V, or their cotangents, times what balances them."""
    return tuple(factors if scales is None else map(torch.mul, factors, scales))


def _scales(a: Arguments, group: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Powers of two that balance U and V; an error in every process for what is not finite."""
    parts = [functional.pad(x.abs(), (0, 0, 0, 1)).amax(-2, keepdim=True) for x in (a.U, a.V, a.B)]
    sizes = torch.cat(parts, dim=-1).nan_to_num(nan=torch.inf, posinf=torch.inf)
    distributed.all_reduce(sizes, op=distributed.ReduceOp.MAX, group=group)
    if not torch.isfinite(sizes).all():
        raise ValueError("U, V, B or t contains NaN or infinity; all entries must be finite")
    r = a.U.shape[-1]
    return scale_of(sizes[..., :r], sizes[..., r : 2 * r])


def _basis(X: torch.Tensor, group: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """This process's rows of Q, and R, for the orthonormal Q and triangular R with X = Q R."""
    own, part = torch.linalg.qr(X)
    k, m = part.shape[-2:]
    part = functional.pad(part, (0, 0, 0, m - k)).contiguous()
    parts = [torch.empty_like(part) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(parts, part, group=group)
    mixes, R = torch.linalg.qr(torch.cat(parts, dim=-2))
    first = m * distributed.get_rank(group)
    return own @ mixes[..., first : first + k, :], R
