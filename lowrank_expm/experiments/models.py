"""Three small vision transformers with the same shapes: what the experiments compare."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..nn import OrthogonalSelfAttention, OrthogonalTransformerBlock
from .pictures import COLOURS, KINDS

__all__ = ["COLOURS", "KINDS", "Classifier", "SoftmaxSelfAttention", "block", "parameters"]


class SoftmaxSelfAttention(OrthogonalSelfAttention):
    """The same weights, from the same start, with softmax instead of exp of a skew matrix."""

    def __init__(self, embed_dim: int, num_heads: int, **kind: Any) -> None:
        super().__init__(embed_dim, num_heads, alpha=1.0, learn_alpha=False, **kind)

    def mix(self, qkv: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """softmax(q kᵀ/√d) v; alpha is one, and the scale is in q already."""
        q, k, v = qkv.split(self.head_dim, dim=-1)
        mask = None if mask is None else mask[..., None, :]
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)


def block(kind: str, width: int, heads: int, depth: int, alpha: float) -> nn.Module:
    """One block of a stack of `depth`; an orthogonal one starts with alpha/√depth."""
    if kind == "softmax, skip and norm":
        return nn.TransformerEncoderLayer(
            width, heads, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
    made = OrthogonalTransformerBlock(width, heads, 2 * width, alpha=alpha / depth**0.5)
    if kind == "softmax":
        made.attention = SoftmaxSelfAttention(width, heads)
    return made


class Classifier(nn.Module):
    """Patches to tokens, blocks, the mean over the tokens, a linear layer."""

    def __init__(
        self, kind: str, depth: int, width: int, heads: int, patch: int, side: int, alpha: float
    ) -> None:
        super().__init__()
        self.patch = patch
        self.embedding = nn.Linear(patch * patch, width)
        self.position = nn.Parameter(0.5 * torch.randn((side // patch) ** 2, width))
        nn.init.normal_(self.embedding.weight, std=1 / patch)
        self.blocks = nn.ModuleList(block(kind, width, heads, depth, alpha) for _ in range(depth))
        self.norm = nn.LayerNorm(width) if "norm" in kind else nn.Identity()
        self.head = nn.Linear(width, 10)

    def tokens(self, images: torch.Tensor) -> torch.Tensor:
        """Images (b, side, side) as tokens (b, n, width)."""
        patches = images.unfold(1, self.patch, self.patch).unfold(2, self.patch, self.patch)
        return self.embedding(patches.flatten(3).flatten(1, 2)) + self.position

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Ten numbers an image."""
        x = self.tokens(images)
        for one in self.blocks:
            x = one(x)
        return self.head(self.norm(x).mean(dim=1))


def parameters(model: nn.Module) -> int:
    """How many numbers a model learns."""
    return sum(p.numel() for p in model.parameters())
