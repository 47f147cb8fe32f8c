"""The studies: orthogonality, cost, rank, conditioning, training, and the choice of alpha."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import verify
from ..attention import orthogonal_attention_packed
from .data import bundled, mnist
from .models import KINDS, Classifier, block
from .pictures import COST_KINDS
from .report import Result, Rows
from .training import Recipe, accuracy, alphas, train

Tick = Callable[[str], Any]


class Plan(NamedTuple):
    """How large the studies are."""

    quick: bool
    seeds: int
    mnist: Path | None
    recipe: Recipe
    tick: Tick

    def pick(self, quick: Any, full: Any) -> Any:
        """The quick value or the full one."""
        return quick if self.quick else full

    def epochs(self, most: int) -> int:
        """The passes over the images, of a quick study at most so many."""
        return self.pick(min(most, self.recipe.epochs), self.recipe.epochs)

    def digits(self) -> Any:
        """The images to train on."""
        return mnist(self.mnist) if self.mnist else bundled()


# ------------------------------------------------------------------- (a) orthogonality


def orthogonality(plan: Plan) -> Result:
    """The defect of every layer's attention matrices, before and after training."""
    depth, digits = plan.pick(4, 12), bundled()._replace(patch=1)
    recipe = plan.recipe._replace(epochs=plan.pick(1, 5))
    plan.tick("training")
    torch.manual_seed(0)
    fresh = Classifier(KINDS[0], depth, recipe.width, recipe.heads, 1, 8, recipe.alpha)
    trained = train(KINDS[0], depth, 0, digits, recipe).model
    rows: Rows = []
    for dtype in (torch.float32, torch.float64):
        plan.tick(f"defects in {dtype}")
        before, after = (
            list(_defects(model, digits.images[:2].to(dtype), dtype)) for model in (fresh, trained)
        )
        for layer, (old, new) in enumerate(zip(before, after, strict=True), 1):
            rows.append(
                {
                    "layer": layer,
                    "dtype": str(dtype).removeprefix("torch."),
                    "defect / u at first": old,
                    "defect / u after training": new,
                    "|alpha| after training": alphas(trained)[layer - 1],
                }
            )
    title = f"‖AᵀA − I‖₂ of the attention matrices, in units of roundoff; 64 tokens, depth {depth}"
    return Result("orthogonality", title, rows)


@torch.no_grad()
def _defects(model: Classifier, images: torch.Tensor, dtype: torch.dtype) -> Iterator[float]:
    """The largest defect over images and heads, layer by layer."""
    model.to(dtype)
    x, unit = model.tokens(images), torch.finfo(dtype).eps / 2
    eye = torch.eye(x.shape[1], dtype=dtype)
    one: Any
    for one in model.blocks:
        qk = one.attention._project(x)[..., : 2 * one.attention.head_dim]
        packed = torch.cat([qk, eye.expand(*qk.shape[:-2], *eye.shape)], dim=-1)
        A = orthogonal_attention_packed(packed, head_dim=one.attention.head_dim, scale=1.0)
        yield max(verify.orthogonality_defect(a.numpy()) for a in A.flatten(0, -3)) / unit
        x = one(x)
    model.float()


# --------------------------------------------------------------------------- (b) cost

# Torch, NumPy's BLAS and this library each read their own.
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "LOWRANK_EXPM_NUM_THREADS")


def cost(plan: Plan) -> Result:
    """Time and memory of a forward and backward pass against the number of tokens."""
    longest, patience = plan.pick((2048, 5.0), (65536, 120.0))
    rows: Rows = []
    for kind in COST_KINDS:
        n = 128
        while n <= longest:
            plan.tick(f"{kind}, n = {n:,}")
            found = _measured(kind, n)
            rows.append({"kind": kind, "n": n, **found})
            if kind != "orthogonal" and _ends(found, patience):
                break
            n *= 2
    title = "forward + backward, 4 heads of 64, float32, one sequence"
    notes = [
        "memory is what a process needs beyond the same process without the passes",
        "a kind stops where its next size would take too long or more memory than there is",
    ]
    return Result("cost", title, rows, notes)


def _ends(found: dict[str, float | None], patience: float) -> bool:
    """Whether four times the time is too long, or four times the memory more than half of it."""
    seconds, used = found["seconds"], found["MiB"]
    if seconds is None or used is None or not hasattr(os, "sysconf"):
        return seconds is None
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**20
    return 4 * seconds > patience or 4 * used > there / 2


def _measured(kind: str, n: int) -> dict[str, float | None]:
    """Measured in a process of its own, which has a peak memory of its own."""
    threads = str(torch.get_num_threads())
    command = [sys.executable, "-m", "lowrank_expm.experiments.measure", kind, str(n), threads]
    everywhere = dict.fromkeys(THREADS, threads)
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | everywhere)
    if done.returncode:
        return {"seconds": None, "CPU seconds": None, "MiB": None}
    return json.loads(done.stdout)


# --------------------------------------------------------------------------- (c) rank


def rank(plan: Plan) -> Result:
    """The effective rank of the token matrix against depth."""
    n, width, deepest = 48, 64, plan.pick(16, 64)
    depths = [2**i for i in range(deepest.bit_length())]
    rows: Rows = []
    for kind in KINDS:
        plan.tick(kind)
        ranks = [_ranks(kind, seed, n, width, depths, plan) for seed in range(plan.seeds)]
        for i, depth in enumerate(depths):
            values = [one[i] for one in ranks]
            row = {"kind": kind, "depth": depth, "effective rank": statistics.mean(values)}
            rows.append({**row, "smallest": min(values), "largest": max(values)})
    title = f"effective rank of the tokens, {n} random tokens of width {width}, untrained"
    return Result("rank", title, rows, [f"{plan.seeds} seeds"])


@torch.no_grad()
def _ranks(kind: str, seed: int, n: int, width: int, depths: list[int], plan: Plan) -> list[float]:
    """The ranks of one stack; an orthogonal one starts with the alpha of the deepest."""
    torch.manual_seed(seed)
    x, found = torch.randn(1, n, width), []
    for depth in range(1, depths[-1] + 1):
        x = block(kind, width, 4, depths[-1], plan.recipe.alpha)(x)
        if depth in depths:
            found.append(effective_rank(x[0].numpy()))
    return found


def effective_rank(a: np.ndarray) -> float:
    """exp of the entropy of the singular values (Roy and Vetterli 2007)."""
    values = np.linalg.svd(a.astype(np.float64), compute_uv=False)
    p = values / values.sum()
    return float(np.exp(-(p * np.log(np.where(p > 0, p, 1.0))).sum()))


# ------------------------------------------------------------------- (d) conditioning


def conditioning(plan: Plan) -> Result:
    """The condition number of a stack's Jacobian with respect to its input."""
    n, width, heads = 9, 32, 4
    depths = plan.pick((1, 2, 4), (1, 2, 4, 8, 16, 32))
    rows: Rows = []
    for kind in KINDS:
        for depth in depths:
            plan.tick(f"{kind}, depth {depth}")
            values = [
                condition(kind, depth, seed, n, width, heads, plan.recipe.alpha)
                for seed in range(plan.seeds)
            ]
            row = {"kind": kind, "depth": depth, "condition number": statistics.median(values)}
            rows.append({**row, "smallest": min(values), "largest": max(values)})
    title = f"Jacobian of stacks, {n} random tokens, width {width}, {heads} heads, median of seeds"
    return Result("conditioning", title, rows, [f"{plan.seeds} seeds"])


def condition(
    kind: str, depth: int, seed: int, n: int, width: int, heads: int, alpha: float
) -> float:
    """One stack's, from the dense Jacobians of its blocks by the chain rule."""
    torch.manual_seed(seed)
    x = torch.randn(n, width, dtype=torch.float64)
    product = np.eye(n * width)
    for _ in range(depth):
        x, J = jacobian(block(kind, width, heads, depth, alpha).double(), x)
        product = J @ product
    spectrum = verify.jacobian_singular_values(
        lambda v: product @ v, lambda v: product.T @ v, n * width, k=1
    )
    return min(spectrum.condition, 1e16)


def jacobian(layer: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
    """layer(x) and its dense Jacobian: a batch of copies, one for each row."""
    size = x.numel()
    copies = x.expand(size, *x.shape).contiguous().requires_grad_()
    y = layer(copies)
    rows = torch.eye(size, dtype=x.dtype).reshape(size, *x.shape)
    (J,) = torch.autograd.grad(y, copies, rows)
    return y[0].detach(), J.reshape(size, size).numpy()


# ----------------------------------------------------------------------- (e) training


def training(plan: Plan) -> Result:
    """Test accuracy of the three kinds against depth."""
    digits, depths = plan.digits(), plan.pick((2, 4), (2, 4, 8, 12))
    recipe = plan.recipe._replace(epochs=plan.epochs(3))
    rows, curves = [], {}
    for depth in depths:
        for kind in KINDS:
            runs = []
            for seed in range(plan.seeds):
                plan.tick(f"depth {depth}, {kind}, seed {seed}")
                runs.append(train(kind, depth, seed, digits, recipe))
            curves[f"{kind}, depth {depth}"] = [run.accuracies for run in runs]
            final = [run.accuracies[-1] for run in runs]
            early = [run.accuracies[(recipe.epochs - 1) // 4] for run in runs]
            rows.append(
                {
                    "depth": depth,
                    "kind": kind,
                    "parameters": runs[0].parameters,
                    "test accuracy": statistics.mean(final),
                    "lowest": min(final),
                    "highest": max(final),
                    "after a quarter": statistics.mean(early),
                    "training loss": statistics.mean(run.losses[-1] for run in runs),
                }
            )
    title = f"test accuracy, {recipe.epochs} epochs, {plan.seeds} seeds"
    return Result("training", title, rows, details={"curves": curves})


# -------------------------------------------------------------------------- (f) alpha


def alpha(plan: Plan) -> Result:
    """What the first alpha and its learning rate trade: conditioning against learning."""
    depth, digits = plan.pick(4, 10), plan.digits()
    epochs = plan.epochs(3)
    rows: Rows = []
    for first in plan.pick((0.03, 0.3), (0.01, 0.03, 0.1, 0.3, 1.0)):
        for rate in plan.pick((10.0,), (1.0, 10.0)):
            recipe = plan.recipe._replace(alpha=first, alpha_rate=rate, epochs=epochs)
            runs = []
            for seed in range(plan.seeds):
                plan.tick(f"alpha {first:g}/√{depth}, rate {rate:g}, seed {seed}")
                runs.append(train(KINDS[0], depth, seed, digits, recipe))
            rows.append(
                {
                    "alpha·√depth": first,
                    "alpha's rate": rate,
                    "condition at first": condition(KINDS[0], depth, 0, 9, 32, 4, first),
                    "accuracy after a quarter": _mean(
                        r.accuracies[(epochs - 1) // 4] for r in runs
                    ),
                    "test accuracy": _mean(r.accuracies[-1] for r in runs),
                    "training loss": _mean(r.losses[-1] for r in runs),
                    "|alpha| at last": _mean(a for r in runs for a in r.alphas),
                }
            )
    title = f"the first alpha of orthogonal attention, depth {depth}, {epochs} epochs"
    return Result("alpha", title, rows, [f"{plan.seeds} seeds"])


def _mean(values: Any) -> float:
    """The mean."""
    return statistics.mean(values)


STUDIES: dict[str, Callable[[Plan], Result]] = {
    study.__name__: study for study in (orthogonality, cost, rank, conditioning, training, alpha)
}
__all__ = ["STUDIES", "Plan", "accuracy", "condition", "effective_rank", "jacobian"]
