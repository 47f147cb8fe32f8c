"""torch: exp(t(U Vᴴ − V Uᴴ)) B as one node of autograd's graph, with the library's own derivatives.

The node keeps its arguments, by reference, and two small matrices: G = XᴴX and T = XᴴB with
X = [U V]. Tensors on the CPU are read where they lie by the passes and the core for NumPy; other
tensors, and those that a compiler traces, take the array-API form of the same steps.

Derivatives of derivatives, and derivatives under vmap, take that form too, on the route "gram":
no step of it divides by a gap between eigenvalues, so autograd can follow them all.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode

from . import _portable, _portable_derivatives
from ._array import is_traced
from ._foreign import Arguments, Checked, cast, checked, fold
from ._portable_derivatives import pulled_back, summed_to, times
from ._tangent import Gram, Linearised
from .passes import Frame, passes_for

Tensor = Any


def multiply(U: Any, V: Any, B: Any, t: Any, method: str, out: Any = None) -> Tensor:
    """exp(t(U Vᴴ − V Uᴴ)) B."""
    c = checked(U, V, B, t)
    if out is not None:
        _refuse_to_record(c, out)
        return _portable.written(out, _without_column(c, value(c, method)))
    if not _is_recorded(c):
        return _without_column(c, value(c, method))
    node = Traced if torch.compiler.is_compiling() else Node
    U, V, B = (a if _is_inexact(a) else a.to(c.dtype) for a in (c.U, c.V, c.B))
    return _without_column(c, node.apply(U, V, B, c.t, How(c.dtype, method))[0])


def _without_column(c: Checked, Y: Tensor) -> Tensor:
    """A result in the caller's shape."""
    return Y[..., 0] if c.vector else Y


def _is_inexact(a: Tensor) -> bool:
    """Whether a tensor can have a gradient."""
    return a.is_floating_point() or a.is_complex()


def _is_recorded(c: Checked) -> bool:
    """Whether autograd, or a transform of torch.func, follows the computation."""
    tensors = c.U, c.V, c.B, c.t
    if torch.is_grad_enabled() and any(a.requires_grad for a in tensors):
        return True
    return not torch.compiler.is_compiling() and any(
        torch._C._functorch.is_functorch_wrapped_tensor(a)
        or forward_ad.unpack_dual(a).tangent is not None
        for a in tensors
    )


def _refuse_to_record(c: Checked, out: Any) -> None:
    """Refuse `out` where gradients are asked for: what is overwritten has none."""
    if _is_recorded(c) or (torch.is_grad_enabled() and getattr(out, "requires_grad", False)):
        raise ValueError("out cannot be used where gradients are recorded; leave it out")


# Values: on NumPy's side or in array-API form.


def value(c: Checked, method: str) -> Tensor:
    """exp(tS)B in the result's dtype, with a column axis."""
    if in_numpy(c.U, c.V, c.B, c.t):
        from .skew import _multiply_arrays

        U, V, B, t = _numpy(c)
        single = t.item() if t.ndim == 0 else t
        return torch.from_numpy(_multiply_arrays(U, V, B, single, method)).to(c.dtype)
    with without_autocast(c.U):
        a = cast(c)._replace(vector=False)
        return a.unfold(_portable.forward(a, method))


def in_numpy(*tensors: Tensor) -> bool:
    """Whether NumPy can read tensors where they lie, and nothing watches what torch does."""
    if torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None:
        return False
    if any(torch._C._functorch.is_legacy_batchedtensor(a) for a in tensors):
        raise NotImplementedError(
            "is_grads_batched and vectorize=True do not work here; use torch.func.vmap or jacrev"
        )
    return all(
        type(a) in (torch.Tensor, torch.nn.Parameter)
        and a.device.type == "cpu"
        and a.layout == torch.strided
        and not is_traced(a)
        for a in tensors
    )


def _numpy(c: Checked) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The arguments in the precision to compute in, as NumPy arrays of the same memory."""
    a = cast(c, folding=False)
    return _shared(a.U), _shared(a.V), _shared(a.B), _shared(a.t)


def _shared(a: Tensor) -> np.ndarray:
    """A tensor's memory as a NumPy array."""
    return a.detach().resolve_conj().resolve_neg().numpy()


def without_autocast(a: Tensor) -> AbstractContextManager[Any]:
    """A context in which products have the precision of their operands."""
    kind = a.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


def solved(c: Checked, method: str) -> tuple[Tensor, Tensor, Tensor]:
    """exp(tS)B as `value`, with G and T where its derivatives can use them, else empty ones."""
    if not (acts(c) and in_numpy(c.U, c.V, c.B, c.t)):
        return _solved_portably(c, method)
    if method != "auto":
        return value(c, method), *_nothing(c)
    from ._problem import problem

    p = problem(*_numpy(c))
    results, linears = zip(*map(p.linearised, p.times), strict=True) if p.t.size else ((), ())
    Y = torch.from_numpy(p.stack(results)).to(c.dtype)
    if p.scale is not None or not all(isinstance(a, Gram) for a in linears):
        return Y, *_nothing(c)
    return Y, torch.from_numpy(p.G), torch.from_numpy(p.T)


def _solved_portably(c: Checked, method: str) -> tuple[Tensor, Tensor, Tensor]:
    """The same in array-API form."""
    with without_autocast(c.U):
        a = cast(c)._replace(vector=False)
        if not acts(a):
            return a.unfold(_portable.unchanged(a)), *_nothing(c)
        s = _portable.solve(a, method)
        Y = a.unfold(_portable.applied(s, s.core.C, s.T, a.B, a.t.ndim))
    return (Y, *_nothing(c)) if s.G is None else (Y, s.G, s.T)


def _nothing(c: Checked) -> tuple[Tensor, Tensor]:
    """G and T of a route that has none."""
    return c.t.new_empty((0, 0)), c.t.new_empty((0, 0))


def acts(a: Checked | Arguments) -> bool:
    """Whether there is anything to rotate."""
    return all(a.shape) and bool(a.U.shape[-1])


# First derivatives: exact by the route of the value, smooth in array-API form by the Gram matrix.


class How(NamedTuple):
    """What is not a tensor: the result's dtype, and the method."""

    dtype: torch.dtype
    method: str

    def checked(self, U: Tensor, V: Tensor, B: Tensor, t: Tensor) -> Checked:
        """Arguments that were checked when the node was made."""
        return Checked(U, V, B, t, self.dtype, False)


def pulled(how: How, Ybar: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
    """The cotangents of U, V, B and t, given these and what `solved` kept."""
    *arguments, G, T = given
    c = how.checked(*arguments)
    if not (acts(c) and in_numpy(Ybar, *given)):
        return pulled_portably(how, Ybar, *given)
    from . import derivatives
    from ._problem import problem, size

    arrays = _numpy(c)
    bar = _shared(Ybar.to(torch.from_numpy(arrays[2]).dtype) if not Ybar.is_complex() else Ybar)
    known = (G.numpy(), T.numpy()) if G.numel() else None
    p = problem(*arrays, known)
    try:
        if known:
            linears: list[Linearised] = [Gram(p.frame, p.G, p.T, t, p.folded) for t in p.times]
        else:
            linears = [p.linearised(t)[1] for t in p.times]
        bars = derivatives._pulled_back(p, linears, bar, size(bar))
    except ValueError:  # an overflow: autograd expects it in the values
        return tuple(torch.full_like(a, torch.nan) for a in arguments)
    return tuple(_like(b, a) for b, a in zip(bars, arguments, strict=True))


def _like(bar: Any, given: Tensor) -> Tensor:
    """A cotangent in its argument's dtype: that of a real argument is real."""
    a = np.asarray(bar)
    return torch.from_numpy(a if given.is_complex() else np.real(a)).to(given.dtype)


def pulled_portably(
    how: How, Ybar: Tensor, *given: Tensor, smooth: bool = False
) -> tuple[Tensor, ...]:
    """The same in array-API form; `smooth` where derivatives of it are wanted."""
    *arguments, G, T = given
    with without_autocast(Ybar):
        a = cast(how.checked(*arguments))
        bar = fold(Ybar) if a.folded else Ybar
        parts = None
        if acts(a):
            G, T = passes_for(a.B).accumulate(Frame((a.U, a.V)), a.B) if smooth else (G, T)
            parts = [_linearised(a, t, G, T, how, smooth) for t in times(a)]
        *bars, tbar = pulled_back(a, parts, bar.to(a.B.dtype))
        bars = [summed_to(b, x) for b, x in zip(bars, arguments, strict=False)]
        return *bars, tbar


def _linearised(
    a: Arguments, t: Tensor, G: Tensor, T: Tensor, how: How, smooth: bool
) -> Linearised:
    """The derivatives at one t."""
    if not G.numel():
        return _portable.linearise(a, t)[1]
    within = _portable.bound(a, smooth or a.blind or how.method == "gram")
    return Gram(Frame((a.U, a.V)), G, T, t, a.B, within)


def pushed(how: How, *given: Tensor) -> tuple[Tensor]:
    """The derivative of exp(tS)B, given U, V, B, t and a direction of each."""
    if not in_numpy(*given):
        return pushed_portably(how, *given)
    from .derivatives import jvp

    U, V, B, t = _numpy(how.checked(*given[:4]))
    dU, dV, dB, dt = _numpy(how.checked(*given[4:]))
    with np.errstate(all="ignore"):
        return (torch.from_numpy(jvp(U, V, B, dU, dV, dB, t=t, dt=dt)[1]).to(how.dtype),)


def pushed_portably(how: How, *given: Tensor, smooth: bool = False) -> tuple[Tensor]:
    """The same in array-API form; `smooth` where derivatives of it are wanted."""
    U, V, B, t, dU, dV, dB, dt = given
    with without_autocast(U):
        if not smooth:
            return (_portable_derivatives.jvp(U, V, B, dU, dV, dB, t, dt)[1].to(how.dtype),)
        a, d = cast(how.checked(U, V, B, t)), cast(how.checked(dU, dV, dB, dt))
        if not acts(a):
            return (a.unfold(_portable.unchanged(a._replace(B=d.B))),)
        G, T = passes_for(a.B).accumulate(Frame((a.U, a.V)), a.B)
        moved: list[Any] = [
            _linearised(a, one, G, T, how, True).jvp(d.U, d.V, d.B, step)
            for one, step in zip(times(a), times(d), strict=True)
        ]
        return (a.unfold(torch.stack(moved) if t.ndim else moved[0]),)


# Nodes of the graph.


class Exact(torch.autograd.Function):
    """A function that is computed in one way and differentiated in another."""

    @staticmethod
    def forward(exact: Any, smooth: Any, *given: Tensor) -> Any:
        """The exact values."""
        return exact(*given)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep the arguments."""
        ctx.smooth = inputs[1]
        ctx.save_for_backward(*inputs[2:])
        ctx.save_for_forward(*inputs[2:])

    @staticmethod
    def backward(ctx: Any, *bars: Tensor) -> Any:
        """Cotangents by the smooth form."""
        return None, None, *torch.func.vjp(ctx.smooth, *ctx.saved_tensors)[1](bars)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Tangents by the smooth form: the adjoint of its adjoint, for dual levels do not nest."""
        values, back = torch.func.vjp(ctx.smooth, *ctx.saved_tensors)[:2]
        zeros = tuple(map(torch.zeros_like, values))
        return torch.func.vjp(lambda *bars: back(bars), *zeros)[1](tangents[2:])

    @staticmethod
    def vmap(info: Any, in_dims: Any, exact: Any, smooth: Any, *given: Tensor) -> Any:
        """The smooth form, which vmap can trace."""
        results = torch.vmap(smooth, in_dims[2:])(*given)
        return results, (0,) * len(results)


class Traced(torch.autograd.Function):
    """(U, V, B, t) ↦ Y, with G and T as further results that have no derivative.

    In this form compilers can trace it: they support no `jvp` of a node's own, and no second
    derivative.
    """

    @staticmethod
    def forward(U: Tensor, V: Tensor, B: Tensor, t: Tensor, how: How) -> tuple[Tensor, ...]:
        """Y, and what its derivatives need."""
        return solved(how.checked(U, V, B, t), how.method)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep the arguments, G and T."""
        given, ctx.how = inputs[:4], inputs[4]
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*given, *output[1:])

    @staticmethod
    def backward(ctx: Any, Ybar: Tensor, *_: Any) -> Any:
        """The cotangents."""
        return *pulled(ctx.how, Ybar, *ctx.saved_tensors), None


class Node(Traced):
    """The same with derivatives of both modes and any order, and a rule for vmap."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep the arguments, G and T."""
        Traced.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs[:4])

    @staticmethod
    def backward(ctx: Any, Ybar: Tensor, *_: Any) -> Any:
        """The cotangents, as functions that have derivatives."""
        exact, smooth = partial(pulled, ctx.how), partial(pulled_portably, ctx.how, smooth=True)
        return *Exact.apply(exact, smooth, Ybar, *ctx.saved_tensors)[:4], None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """The tangent of Y."""
        exact, smooth = partial(pushed, ctx.how), partial(pushed_portably, ctx.how, smooth=True)
        return Exact.apply(exact, smooth, *ctx.saved_tensors, *tangents[:4])[0], None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, U: Tensor, V: Tensor, B: Tensor, t: Tensor, how: How) -> Any:
        """The mapped axis in front of the batch; a mapped t multiplies U."""
        at_u, at_v, at_b, at_t, _ = in_dims
        grid = t.ndim if at_t is None else t.ndim - 1
        turns = at_t is not None
        tensors = [_fronted(a, at) for a, at in ((U, at_u), (V, at_v), (B, at_b))]
        rank = max(a.ndim - 1 for a in tensors) + (grid if turns else 0)
        U, V, B = (_padded(a, rank) for a in tensors)
        if turns:
            t = t.movedim(at_t, 0)
            U = t.reshape(*t.shape, *(1,) * (rank - grid)) * U
            t = t.new_ones(())
        Y = Node.apply(U, V, B, t, how)[0]
        empty = t.new_empty((0, 0))
        return (Y, empty, empty), (0 if turns else grid, None, None)


def _fronted(a: Tensor, at: int | None) -> Tensor:
    """A tensor with its mapped axis, or one of length one, in front."""
    return a[None] if at is None else a.movedim(at, 0)


def _padded(a: Tensor, rank: int) -> Tensor:
    """A tensor with axes behind the first, so that there are `rank` more."""
    return a.reshape(a.shape[0], *(1,) * (rank + 1 - a.ndim), *a.shape[1:])
