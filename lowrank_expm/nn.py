"""Torch modules for Orthogonal Self-Attention: the attention layer and a skipless block.

Needs PyTorch (`pip install "lowrank_expm[torch]"`). All mathematics is in the library; this
module holds weights, where they start, and how fast alpha learns.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from .attention import orthogonal_attention_packed, orthogonal_initialization

try:
    import torch
    from torch import nn
    from torch.nn import functional
except ImportError as error:
    raise ImportError(
        "lowrank_expm.nn needs PyTorch; install it with: pip install 'lowrank_expm[torch]'"
    ) from error

__all__ = ["ALPHA", "OrthogonalSelfAttention", "OrthogonalTransformerBlock", "parameter_groups"]

# The alpha of one layer; a stack of L divides it by √L.
ALPHA = 0.03
# How much faster alpha learns than the weights.
ALPHA_RATE = 10.0


Activation = Callable[[torch.Tensor], torch.Tensor]
ACTIVATIONS: dict[str, Activation] = {"gelu": functional.gelu, "relu": functional.relu}


class _Part(nn.Linear):
    """A linear layer that starts as the module around it says, whoever resets it, and when."""

    reset_around: Callable[[], None] | None = None

    def reset_parameters(self) -> None:
        """Reset what starts together, or, while it is made, as torch does."""
        if self.reset_around is None:
            super().reset_parameters()
        else:
            self.reset_around()


class OrthogonalSelfAttention(nn.Module):
    """Multi-head self-attention whose attention matrices are orthogonal.

    Every head mixes the tokens by exp(α/√d (Q Kᵀ − K Qᵀ)) in time linear in their number. Not
    causal.

    Parameters
    ----------
    embed_dim : int
        Width of a token.
    num_heads : int
        Heads, a divisor of embed_dim; each has d = embed_dim / num_heads columns.
    bias : bool, optional
        Whether both projections have a bias, zero at first.
    device, dtype : optional
        Of the parameters.
    alpha : float, optional
        Where every head's alpha starts. For a stack of L layers `alpha / sqrt(L)` keeps the
        Jacobian of the stack as well conditioned as that of one layer.
    learn_alpha : bool, optional
        Whether alpha is a parameter; otherwise it is a buffer.
    process_group : torch.distributed.ProcessGroup, optional
        Processes that share the sequence: each has the same weights and calls the layer with its
        rows of x. See `lowrank_expm.distributed`. One process has all rows if None.

    Attributes
    ----------
    in_proj_weight : Parameter, (3·embed_dim, embed_dim)
        For each head in turn its rows for q, k and v. `torch.nn.MultiheadAttention` has them in
        another order: all heads' q first.
    in_proj_bias : Parameter, (3·embed_dim,), or None
    out_proj : torch.nn.Linear
    alpha : Parameter or Tensor, (num_heads,)

    Raises
    ------
    ValueError
        Where num_heads does not divide embed_dim, or alpha is not finite.
    TypeError
        For sizes that are no integers; for a layer with a process_group that is pickled: save its
        state_dict.

    Notes
    -----
    Starts from `attention.orthogonal_initialization`: close to an orthogonal map of the tokens.
    Made on the meta device it starts when it is given memory: by `to_empty(device=…)`, and
    `reset_parameters` of this module, or of all modules in any order.
    alpha and 1/√d multiply the rows of the projection that make q, so nothing of the sequence's
    length is multiplied or copied for them. bfloat16 and float16, under autocast too, keep the
    projections in their type and exponentiate in float32. Zhang and Martens (2026,
    arXiv:2602.05996).

    With a process_group, the gradients of x are those of the sum of all processes' losses. The
    gradients of parameters are this process's part: whoever trains sums them over the group before
    a step, by an all-reduce of each `.grad`; `DistributedDataParallel` over the group takes their
    mean instead.

    Examples
    --------
    >>> import torch
    >>> from lowrank_expm.nn import OrthogonalSelfAttention
    >>> attention = OrthogonalSelfAttention(embed_dim=64, num_heads=4)
    >>> x = torch.randn(2, 100, 64)                       # batch, tokens, width
    >>> attention(x).shape
    torch.Size([2, 100, 64])
    """

    alpha: torch.Tensor
    in_proj_bias: torch.Tensor | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        alpha: float = ALPHA,
        learn_alpha: bool = True,
        process_group: Any = None,
    ) -> None:
        super().__init__()
        _check_numbers(alpha, embed_dim=embed_dim, num_heads=num_heads)
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim is {embed_dim}; num_heads = {num_heads} must divide it")
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.head_dim = embed_dim // num_heads
        self.initial_alpha, self.process_group = alpha, process_group
        kind = {"device": device, "dtype": dtype}
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim, **kind))
        bias_rows = nn.Parameter(torch.empty(3 * embed_dim, **kind)) if bias else None
        self.register_parameter("in_proj_bias", bias_rows)
        self.out_proj = _Part(embed_dim, embed_dim, bias=bias, **kind)
        self.out_proj.reset_around = self.reset_parameters
        start = torch.empty(num_heads, **kind)
        if learn_alpha:
            self.alpha = nn.Parameter(start)
        else:
            self.register_buffer("alpha", start)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new weights, by torch's random state; alpha goes back to where it started.

        Returns
        -------
        None
        """
        if not _have_values(self.in_proj_weight, self.out_proj.weight):
            return
        weights = orthogonal_initialization(self.embed_dim, self.num_heads, rng=_generator())
        _fill(self.in_proj_weight, weights.in_proj_weight)
        _fill(self.out_proj.weight, weights.out_proj_weight)
        self.alpha.fill_(self.initial_alpha)
        if self.in_proj_bias is not None:
            self.in_proj_bias.zero_()
            self.out_proj.bias.zero_()

    def forward(
        self, x: torch.Tensor, key_padding_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Mix the tokens.

        Parameters
        ----------
        x : Tensor, (…, n, embed_dim)
        key_padding_mask : boolean Tensor, (…, n), optional
            True for padding, as in `torch.nn.MultiheadAttention`: these tokens influence no
            other, and are projected only.

        Returns
        -------
        Tensor, (…, n, embed_dim)

        Raises
        ------
        TypeError
            For a mask that is not a boolean tensor.
        """
        qkv = self._project(x)
        mask = None if key_padding_mask is None else _kept(key_padding_mask)
        return self.out_proj(self.mix(qkv, mask).transpose(-3, -2).flatten(-2))

    def mix(self, qkv: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Mix the values of every head.

        Parameters
        ----------
        qkv : Tensor, (…, num_heads, n, 3·head_dim)
            Queries, already times α/√d, keys and values.
        mask : boolean Tensor, (…, num_heads or 1, n), or None
            True where a token takes part.

        Returns
        -------
        Tensor, (…, num_heads, n, head_dim)
        """
        with _full_precision(qkv.device.type):
            if self.process_group is None:
                return orthogonal_attention_packed(qkv, scale=1.0, mask=mask)
            from . import distributed

            q, k, v = qkv.split(self.head_dim, dim=-1)
            return distributed.orthogonal_attention(
                q, k, v, scale=1.0, mask=mask, group=self.process_group
            )

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        """Every head's [αq/√d k v], (…, num_heads, n, 3·head_dim), a view of one product."""
        factor = self.alpha.new_ones(self.num_heads, 3, 1)
        turn = (self.alpha / math.sqrt(self.head_dim))[:, None, None]
        factor = torch.cat([turn, factor[:, 1:]], dim=1).expand(-1, -1, self.head_dim).flatten()
        bias = None if self.in_proj_bias is None else factor * self.in_proj_bias
        qkv = functional.linear(x, factor[:, None] * self.in_proj_weight, bias)
        return qkv.unflatten(-1, (self.num_heads, 3 * self.head_dim)).transpose(-3, -2)

    def __deepcopy__(self, memo: dict[int, Any]) -> OrthogonalSelfAttention:
        """A copy that shares the process group, which cannot be copied."""
        memo[id(self.process_group)] = self.process_group
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def __copy__(self) -> OrthogonalSelfAttention:
        """A copy that shares everything."""
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: a process group cannot be, and without it the layer means another."""
        if self.process_group is not None:
            raise TypeError(
                "a layer with a process_group cannot be pickled; save its state_dict(), or set "
                "process_group to None first"
            )
        return super().__getstate__()

    def extra_repr(self) -> str:
        """What `print` shows.

        Returns
        -------
        str
        """
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}"


class OrthogonalTransformerBlock(nn.Module):
    """Orthogonal attention and an MLP, without skip connections and without normalisation.

    Parameters
    ----------
    embed_dim, num_heads : int
        As in `OrthogonalSelfAttention`.
    dim_feedforward : int, optional
        Width of the MLP, an even number; 4·embed_dim by default.
    activation : callable, "gelu" or "relu", optional
        Of the MLP, torch's gelu by default.
    bias, device, dtype, alpha, learn_alpha, process_group
        As in `OrthogonalSelfAttention`.

    Attributes
    ----------
    attention : OrthogonalSelfAttention
    linear1, linear2 : torch.nn.Linear

    Raises
    ------
    ValueError
        For an odd dim_feedforward or one below 2·embed_dim; as `OrthogonalSelfAttention`.

    Notes
    -----
    The MLP starts as an exact orthogonal map: linear1 has the rows [W; −W] and linear2 the
    columns O [Wᵀ −Wᵀ], with WᵀW = I and O orthogonal, and f(z) − f(−z) = z holds for ReLU, GELU
    and SiLU (Balduzzi et al. 2017, arXiv:1702.08591). A usual initialisation in its place would
    condition a stack of skipless blocks as badly as softmax attention does.

    Examples
    --------
    Eight blocks, with an alpha for their number:

    >>> import torch
    >>> from lowrank_expm.nn import OrthogonalTransformerBlock
    >>> blocks = [OrthogonalTransformerBlock(64, 4, alpha=0.03 / 8**0.5) for _ in range(8)]
    >>> torch.nn.Sequential(*blocks)(torch.randn(2, 50, 64)).shape
    torch.Size([2, 50, 64])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dim_feedforward: int | None = None,
        *,
        activation: Activation | str = "gelu",
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        alpha: float = ALPHA,
        learn_alpha: bool = True,
        process_group: Any = None,
    ) -> None:
        super().__init__()
        _check_numbers(alpha, embed_dim=embed_dim, num_heads=num_heads)
        width = 4 * embed_dim if dim_feedforward is None else dim_feedforward
        _check_numbers(alpha, dim_feedforward=width)
        if width % 2 or width < 2 * embed_dim:
            raise ValueError(
                f"dim_feedforward is {width}; with embed_dim = {embed_dim} it must be an even "
                f"number of at least {2 * embed_dim}"
            )
        kind = {"bias": bias, "device": device, "dtype": dtype}
        own = {"alpha": alpha, "learn_alpha": learn_alpha, "process_group": process_group}
        self.attention = OrthogonalSelfAttention(embed_dim, num_heads, **own, **kind)
        self.activation = _activation(activation)
        self.linear1, self.linear2 = (
            _Part(embed_dim, width, **kind),
            _Part(width, embed_dim, **kind),
        )
        self.linear1.reset_around = self.linear2.reset_around = self._reset_mlp
        self._reset_mlp()

    def reset_parameters(self) -> None:
        """Draw new weights.

        Returns
        -------
        None
        """
        self.attention.reset_parameters()
        self._reset_mlp()

    @torch.no_grad()
    def _reset_mlp(self) -> None:
        """The MLP as an orthogonal map."""
        if not _have_values(self.linear1.weight, self.linear2.weight):
            return
        rng, (width, embed_dim) = _generator(), self.linear1.weight.shape
        W, _ = np.linalg.qr(rng.standard_normal((width // 2, embed_dim)))
        turn, _ = np.linalg.qr(rng.standard_normal((embed_dim, embed_dim)))
        both = np.concatenate([W, -W])
        _fill(self.linear1.weight, both)
        _fill(self.linear2.weight, turn @ both.T)
        for linear in (self.linear1, self.linear2):
            if linear.bias is not None:
                linear.bias.zero_()

    def forward(
        self, x: torch.Tensor, key_padding_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attention, then the MLP on each token.

        Parameters
        ----------
        x : Tensor, (…, n, embed_dim)
        key_padding_mask : boolean Tensor, (…, n), optional
            True for padding.

        Returns
        -------
        Tensor, (…, n, embed_dim)
        """
        return self.linear2(self.activation(self.linear1(self.attention(x, key_padding_mask))))


def parameter_groups(
    module: nn.Module, lr: float, *, alpha_rate: float = ALPHA_RATE
) -> list[dict[str, Any]]:
    """The parameters of a model for an optimiser, with a learning rate of its own for alpha.

    Parameters
    ----------
    module : torch.nn.Module
        A model with orthogonal attention anywhere in it.
    lr : float
        The learning rate of all other parameters.
    alpha_rate : float, optional
        How many times as fast alpha learns; it is not decayed.

    Returns
    -------
    list of dict
        For a torch optimiser.

    Notes
    -----
    A small alpha conditions the start, a larger one mixes tokens; Adam moves every parameter by
    about lr a step, which is far for an entry of a weight and little for alpha.

    Examples
    --------
    >>> import torch
    >>> from lowrank_expm.nn import OrthogonalTransformerBlock, parameter_groups
    >>> model = OrthogonalTransformerBlock(16, 2)
    >>> optimiser = torch.optim.AdamW(parameter_groups(model, lr=1e-3))
    >>> [group["lr"] for group in optimiser.param_groups]
    [0.001, 0.01]
    """
    layers = [m for m in module.modules() if isinstance(m, OrthogonalSelfAttention)]
    alphas = {id(p): p for layer in layers for p in _learned_alpha(layer)}
    rest = [p for p in module.parameters() if id(p) not in alphas]
    groups: list[dict[str, Any]] = [{"params": rest, "lr": lr}]
    if alphas:
        groups.append({"params": list(alphas.values()), "lr": alpha_rate * lr, "weight_decay": 0.0})
    return groups


def _learned_alpha(layer: OrthogonalSelfAttention) -> list[nn.Parameter]:
    """The parameter alpha, or those from which a parametrisation makes it."""
    made_from = "parametrizations.alpha.original"
    named = layer.named_parameters()
    return [p for name, p in named if name == "alpha" or name.startswith(made_from)]


def _check_numbers(alpha: float, **sizes: int) -> None:
    """Refuse an alpha that is not finite, and sizes that are no positive integers."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int | np.integer):
            raise TypeError(f"{name} is {size!r}; it must be an integer")
        if size < 1:
            raise ValueError(f"{name} is {size}; it must be positive")
    try:
        finite = math.isfinite(float(alpha))
    except (TypeError, ValueError, OverflowError):
        finite = False
    if not finite:
        raise ValueError(f"alpha is {alpha!r}; it must be a finite number")


def _activation(given: Activation | str) -> Activation:
    """A function, or that of a name."""
    if isinstance(given, str) and given in ACTIVATIONS:
        return ACTIVATIONS[given]
    if not callable(given) or isinstance(given, type):
        names = " or ".join(repr(name) for name in ACTIVATIONS)
        raise TypeError(f"activation is {given!r}; pass a function of a tensor, {names}")
    return given


def _kept(key_padding_mask: torch.Tensor) -> torch.Tensor:
    """Which tokens take part, for all heads."""
    if not isinstance(key_padding_mask, torch.Tensor):
        kind = type(key_padding_mask)
        raise TypeError(
            f"key_padding_mask is a {kind.__module__}.{kind.__qualname__}; pass a boolean tensor"
        )
    if not key_padding_mask.ndim:
        raise ValueError("key_padding_mask has no axis; it must be (…, n), True for padding")
    if key_padding_mask.dtype != torch.bool:
        raise TypeError(
            f"key_padding_mask is of type {key_padding_mask.dtype}; it must be boolean, True for "
            "padding: attention that is orthogonal has no scores to which a number could be added"
        )
    return ~key_padding_mask[..., None, :]


def _full_precision(device_type: str) -> AbstractContextManager[Any]:
    """Autocast off, where the device knows it."""
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def _have_values(*parameters: torch.Tensor) -> bool:
    """Whether all have memory: not on the meta device, and no fakes of a compiler."""
    return not any(p.is_meta or isinstance(p, torch._subclasses.FakeTensor) for p in parameters)


def _generator() -> np.random.Generator:
    """A generator seeded by torch's random state."""
    seed = torch.randint(2**63 - 1, (), device="cpu")
    return np.random.default_rng(int(seed))


def _fill(parameter: torch.Tensor, values: np.ndarray) -> None:
    """Copy, onto the parameter's device or devices and into its dtype."""
    given = torch.from_numpy(np.ascontiguousarray(values))
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is not None:  # a DTensor, which a plain tensor cannot be copied to
        from torch.distributed.tensor import distribute_tensor

        given = given.to(parameter.dtype)
        given = distribute_tensor(given, mesh, parameter.placements)  # type: ignore[attr-defined]
    parameter.copy_(given)
