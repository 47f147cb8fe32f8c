"""Orthogonal attention over a sequence that is split between the processes of a torch group.

Every process holds some rows of the sequence, and all of the weights. What the rows of others
contribute is one m × (m + e) array a head, m = 2d: one all-reduce in the forward and one in the
backward pass. Needs PyTorch (`pip install "lowrank_expm[torch]"`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from . import core
from ._tangent import Gram
from .attention import _attend
from .core.certificate import trusted_up_to
from .passes import Frame, portable_passes

try:
    import torch
    from torch import distributed
except ImportError as error:
    raise ImportError(
        "lowrank_expm.distributed needs PyTorch; install it with: pip install 'lowrank_expm[torch]'"
    ) from error

__all__ = ["orthogonal_attention"]

# The certificate beyond which double precision is not trusted either.
WORST = 1e-8


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
        As `attention.orthogonal_attention`, in every process at once where it is the numbers.

    Notes
    -----
    The core is computed by every process from the same sums. Gradients of q, k and v are those
    of the sum of all processes' losses; those of alpha, and of weights in front, are this
    process's part, to be added up over the group as in data parallelism. The route is "gram":
    where its certificate does not trust single precision, it is done again in double, with a
    second all-reduce. In double precision the orthogonality defect is at most 1e-8, and near
    rounding unless q and k nearly span the same directions.

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
    return _attend(partial(_multiply, group), q, k, v, alpha, scale, mask)


def _multiply(
    group: Any, U: torch.Tensor, V: torch.Tensor, B: torch.Tensor, t: Any
) -> torch.Tensor:
    """exp(t(U Vᴴ − V Uᴴ)) B on rows that are split between processes."""
    batch = torch.broadcast_shapes(U.shape[:-2], V.shape[:-2], B.shape[:-2])
    dtype = torch.promote_types(torch.promote_types(U.dtype, V.dtype), B.dtype)
    work = dtype if dtype in (torch.float64, torch.complex128) else torch.float32
    U, V, B = (a.to(work).expand(*batch, -1, -1) for a in (t * U, V, B))
    return _Split.apply(U, V, B, group).to(dtype)


class _Split(torch.autograd.Function):
    """The operation with one all-reduce in each direction."""

    @staticmethod
    def forward(
        ctx: Any, U: torch.Tensor, V: torch.Tensor, B: torch.Tensor, group: Any
    ) -> torch.Tensor:
        ctx.group = group
        linear, found = _solved(U, V, B, group)
        limit = trusted_up_to(2 * U.shape[-1], torch.finfo(U.dtype).eps / 2)
        wide = torch.promote_types(U.dtype, torch.float64)
        trusted = bool((found.bound <= limit).all())
        if not trusted and wide != U.dtype:
            linear, found = _solved(U.to(wide), V.to(wide), B.to(wide), group)
        if not (trusted or bool((found.bound <= WORST).all())):
            raise ValueError(
                "U and V nearly span the same directions, beyond what the split operation can "
                "resolve in double precision; gather the sequence in one process"
            )
        ctx.linear = linear
        return portable_passes.update(linear.X, found.C @ linear.T, linear.B).to(B.dtype)

    @staticmethod
    def backward(ctx: Any, Ybar: torch.Tensor) -> Any:
        linear = ctx.linear
        wide = Ybar.to(linear.G.dtype)
        P = portable_passes.project(linear.X, wide).contiguous()
        distributed.all_reduce(P, group=ctx.group)
        bars = linear.pulled(wide, P)[:3]
        return *(bar.to(Ybar.dtype) for bar in bars), None


def _solved(U: Any, V: Any, B: Any, group: Any) -> tuple[Gram, core.Core]:
    """What the derivative needs, and the core."""
    X: Any = Frame((U, V))
    sums: Any = torch.cat(portable_passes.accumulate(X, B), dim=-1).contiguous()
    distributed.all_reduce(sums, group=group)
    if not torch.isfinite(sums).all():
        raise ValueError("U, V or B contains NaN or infinity, or their products overflow")
    m = 2 * U.shape[-1]
    one: Any = torch.ones((), dtype=U.dtype, device=U.device)
    linear = Gram(X, sums[..., :m], sums[..., m:], one, B)
    return linear, core.skew(linear.G, one)
