"""Training the three kinds of model on handwritten digits, all in the same way."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from ..nn import OrthogonalSelfAttention, parameter_groups
from .data import Digits
from .models import Classifier, parameters


class Recipe(NamedTuple):
    """How a model is made and trained; the same for every kind."""

    width: int = 32
    heads: int = 4
    epochs: int = 20
    batch: int = 64
    lr: float = 2e-3
    warmup: float = 0.1
    alpha: float = 0.03
    alpha_rate: float = 10.0


class Run(NamedTuple):
    """One training run."""

    losses: list[float]
    accuracies: list[float]
    alphas: list[float]
    parameters: int
    model: Classifier


def train(
    kind: str,
    depth: int,
    seed: int,
    digits: Digits,
    recipe: Recipe,
    tick: Callable[[], Any] = lambda: None,
) -> Run:
    """AdamW, a linear warm-up and a cosine; the test set is looked at after every epoch."""
    torch.manual_seed(seed)
    model = Classifier(
        kind, depth, recipe.width, recipe.heads, digits.patch, digits.side, recipe.alpha
    )
    groups = parameter_groups(model, recipe.lr, alpha_rate=recipe.alpha_rate)
    optimiser = torch.optim.AdamW(groups, lr=recipe.lr, weight_decay=0.0)
    steps = recipe.epochs * math.ceil(len(digits.images) / recipe.batch)

    def rate(step: int) -> float:
        rise = min(1.0, (step + 1) / (recipe.warmup * steps))
        return rise * 0.5 * (1 + math.cos(math.pi * step / steps))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, rate)
    losses, accuracies = [], []
    for _ in range(recipe.epochs):
        losses.append(_epoch(model, digits, recipe.batch, optimiser, schedule))
        accuracies.append(accuracy(model, digits))
        tick()
    return Run(losses, accuracies, alphas(model), parameters(model), model)


def _epoch(model: Classifier, digits: Digits, batch: int, optimiser: Any, schedule: Any) -> float:
    """The mean loss of one pass over the training images."""
    total = 0.0
    for chosen in torch.randperm(len(digits.images)).split(batch):
        loss = functional.cross_entropy(model(digits.images[chosen]), digits.labels[chosen])
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        total += float(loss.detach()) * len(chosen)
    return total / len(digits.images)


@torch.no_grad()
def accuracy(model: Classifier, digits: Digits) -> float:
    """The share of test images that are recognised."""
    found = torch.cat([model(part).argmax(dim=1) for part in digits.test_images.split(500)])
    return float((found == digits.test_labels).float().mean())


def alphas(model: Classifier) -> list[float]:
    """The mean |alpha| of every block; empty for models without."""
    layers = [m for m in model.modules() if isinstance(m, OrthogonalSelfAttention)]
    return [float(m.alpha.detach().abs().mean()) for m in layers if m.alpha.requires_grad]
