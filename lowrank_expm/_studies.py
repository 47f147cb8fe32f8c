"""The studies of a benchmark: what is measured, beside what, and what it is judged by."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal

import numpy as np

from . import _machine, _peers, _threads, core
from ._contest import (
    ANGLE,
    Array,
    Case,
    Contender,
    Study,
    at_least,
    at_most,
    rate,
    seconds,
)
from .bench import (
    ARNOLDI,
    EXPM,
    EXPM_MULTIPLY,
    KRYLOV,
    OURS,
    PLAIN,
    QR,
    STREAM,
    Plan,
    Target,
    Timing,
)
from .skew import skew_expm_multiply

GRAM = f"{OURS}, from a Gram matrix"
GRAM_EXPM = f"{EXPM}, from a Gram matrix"
READ, COPY, GEMM, STACK = "read", "copy", "matrix product", "stacked float32 products"
INTO = f"{OURS}, out=y"
ROOF = "limit: memory or products"


def _machine_study(plan: Plan) -> Study:
    """The rates that others are measured against."""
    n, d = plan.judged_rows * 2 * plan.rank, plan.attention

    def contenders() -> Iterable[Contender]:
        a, out = np.ones(n), np.ones(n)
        yield Contender(READ, "limit", lambda: _machine.read(a), a.nbytes, "GB/s")
        yield Contender(COPY, "limit", lambda: _machine.copy(a, out), 2 * a.nbytes, "GB/s")
        yield _gemm(plan)
        yield _stacked_gemm(*d)

    return Study("machine", "the machine's own rates", [Case("", n, contenders)])


def _gemm(plan: Plan) -> Contender:
    """A large square product in double precision."""
    A = np.random.default_rng(0).standard_normal((plan.gemm, plan.gemm))
    return Contender(GEMM, "limit", lambda: A @ A, 2.0 * plan.gemm**3, "GFlop/s")


def _stacked_gemm(count: int, n: int, d: int) -> Contender:
    """The stacked product X M of attention's shapes in single precision."""
    generator = np.random.default_rng(0)
    X = generator.standard_normal((count, n, 2 * d)).astype(np.float32)
    M = generator.standard_normal((count, 2 * d, 2 * d)).astype(np.float32)
    work = 2.0 * count * n * (2 * d) ** 2
    return Contender(STACK, "limit", lambda: np.matmul(X, M), work, "GFlop/s")


def studies(plan: Plan, rates: dict[str, float]) -> list[Study]:
    """All of them; `rates` is filled in when the first has been run."""
    return [
        _machine_study(plan),
        _rows_study(plan),
        _wide_study(plan),
        _latency_study(plan),
        _core_study(plan),
        _problems_study(plan),
        _attention_study(plan),
        _grid_study(plan),
        _scaling_study(plan, rates, "r"),
        _scaling_study(plan, rates, "k"),
        _threads_study(plan),
    ]


def problem(shape: tuple[int, ...], r: int, k: int | None = None) -> tuple[Array, Array, Array]:
    """U and V with columns of length about √3, so that the angles are about 3, and B."""
    generator = np.random.default_rng(0)
    U = generator.standard_normal((*shape, r))
    V = generator.standard_normal((*shape, r))
    U *= math.sqrt(ANGLE / shape[-1])
    V *= math.sqrt(ANGLE / shape[-1])
    return U, V, generator.standard_normal(shape if k is None else (*shape, k))


def _ours(U: Array, V: Array, B: Array, work: float = 0.0, unit: str = "") -> Contender:
    """This library, one call."""
    return Contender(OURS, "ours", lambda: skew_expm_multiply(U, V, B), work, unit)


def _plain(U: Array, V: Array, B: Array, work: float = 0.0, unit: str = "") -> Contender:
    """The plain NumPy form."""
    return Contender(PLAIN, "peer", lambda: _peers.plain_gram(U, V, B), work, unit)


def _rows_study(plan: Plan) -> Study:
    """One call for growing n, beside everything."""

    def contenders(n: int) -> Iterable[Contender]:
        U, V, b = problem((n,), plan.rank)
        y = np.zeros(n)
        work = _machine.sweep_bytes(U, b)
        yield _ours(U, V, b, work, "GB/s")
        yield Contender(INTO, "ours", lambda: skew_expm_multiply(U, V, b, out=y), work, "GB/s")
        yield Contender(STREAM, "limit", lambda: _machine.two_sweeps(U, V, b, y), work, "GB/s")
        if n in plan.rows_alone:
            return
        for name, peer in _row_peers(n <= plan.dense_rows):
            yield Contender(name, "peer", partial(peer, U, V, b))

    return Study(
        "n",
        f"one call: exp(U Vᵀ - V Uᵀ) b, r = {plan.rank}, k = 1, float64",
        [Case(f"n = {n:,}", n, partial(contenders, n)) for n in plan.rows],
        partial(_judge_rows, plan),
        () if _peers.has_scipy_krylov() else (f"{KRYLOV}: not in this SciPy",),
    )


def _row_peers(small: bool) -> Iterable[tuple[str, Callable[[Array, Array, Array], Array]]]:
    """The peers of one call."""
    yield PLAIN, _peers.plain_gram
    yield QR, _peers.orthonormal_basis
    yield ARNOLDI, _peers.arnoldi
    yield EXPM_MULTIPLY, _peers.scipy_expm_multiply
    if _peers.has_scipy_krylov():
        yield KRYLOV, _peers.scipy_krylov
    if small:
        yield EXPM, _peers.dense


def _judge_rows(plan: Plan, timings: list[Timing]) -> Iterable[Target]:
    """The first and the fifth row of the targets."""
    n, at = plan.judged_rows, f"at n = {plan.judged_rows:,}"
    ours = seconds(timings, OURS, n)
    limit = seconds(timings, STREAM, n)
    yield at_most(f"{OURS} / ({STREAM}) {at}", ours / limit, 2.5)
    bounds = ((PLAIN, 4), (QR, 40), (ARNOLDI, 20), (EXPM_MULTIPLY, 40))
    for name, bound in bounds:
        yield at_least(f"{name} / {OURS} {at}", seconds(timings, name, n) / ours, bound)
    yield _steadiness(plan, timings)
    n = plan.rows[-1]
    extra = _machine.extra_memory(n, plan.rank) / 2**20
    yield at_most(f"memory beyond inputs and result at n = {n:,}", extra, 64, "MiB")


def _steadiness(plan: Plan, timings: list[Timing]) -> Target:
    """How much the time per row varies once the arrays are past the caches."""
    row_bytes = 8 * (2 * plan.rank + 2)
    past = [
        t for t in timings if t.name == OURS and t.size * row_bytes > 2 * _machine.cache_bytes()
    ]
    per_row = [t.seconds / t.size for t in past]
    spread = 100 * (max(per_row) / min(per_row) - 1) if len(past) > 1 else math.nan
    sizes = f"n = {past[0].size:,} to {past[-1].size:,}" if len(past) > 1 else "two sizes needed"
    return at_most(f"spread of the time per row past the caches, {sizes}", spread, 25, "%")


def _wide_study(plan: Plan) -> Study:
    """A problem with many columns against the matrix product."""
    n, r, k = plan.wide
    flops = _flops(n, r, k)

    def contenders() -> Iterable[Contender]:
        U, V, B = problem((n,), r, k)
        yield _ours(U, V, B, flops, "GFlop/s")
        yield _plain(U, V, B, flops, "GFlop/s")
        yield _gemm(plan)

    def judge(timings: list[Timing]) -> Iterable[Target]:
        share = 100 * rate(timings, OURS) / rate(timings, GEMM)
        yield at_least("share of the matrix-product rate", share, 60, "%")

    title = f"many columns: n = {n:,}, r = {r}, k = {k}, counting n m² + 4 n m k operations"
    return Study("wide", title, [Case(f"n = {n:,}", n, contenders)], judge)


def _flops(n: int, r: int, k: int) -> float:
    """Operations of the two passes: the Gram matrix is symmetric."""
    m = 2 * r
    return float(n * m * m + 4 * n * m * k)


def _latency_study(plan: Plan) -> Study:
    """A small problem, where Python's overhead is what counts."""
    n, r = plan.small

    def contenders() -> Iterable[Contender]:
        from scipy.linalg import expm

        U, V, x = problem((n,), r)
        S = _peers.generator(U, V)
        yield _ours(U, V, x)
        yield Contender(EXPM, "peer", lambda: expm(S) @ x)
        yield _plain(U, V, x)

    def judge(timings: list[Timing]) -> Iterable[Target]:
        share = 100 * seconds(timings, OURS) / seconds(timings, EXPM)
        yield at_most(f"share of the time of {EXPM}(S) @ x, S formed", share, 40, "%")

    title = f"latency: n = {n}, r = {r}, k = 1"
    return Study("latency", title, [Case(f"n = {n}", n, contenders)], judge)


def _core_study(plan: Plan) -> Study:
    """The small core alone, of a skew matrix and of a Gram matrix."""
    count = plan.core_batch
    return Study(
        "core",
        f"the small core alone: batch of {count}, angle {ANGLE:g}, beside exp of the same matrices",
        [Case(f"m = {m}", m, partial(_core_contenders, count, m)) for m in plan.cores],
        _judge_cores,
    )


def _core_contenders(count: int, m: int) -> Iterable[Contender]:
    """Both forms, each beside scipy.linalg.expm of the matrix it is the exponential of."""
    from scipy.linalg import expm

    one, t = np.eye(m), np.ones(())
    W, G = _skew_batch(count, m), _gram_batch(count, m)
    JG = _peers.apply_j(G)
    root = np.matrix_transpose(np.linalg.cholesky(G))
    rows = np.matrix_transpose(root)
    yield Contender(
        OURS,
        "ours",
        lambda: core.skew(None, t, W),
        answer=lambda result: one + result.C,
        defect=lambda result: _defect(one + result.C),
    )
    yield Contender(EXPM, "peer", lambda: expm(W), defect=_defect)
    yield Contender(
        GRAM,
        "ours",
        lambda: core.skew(G, t),
        answer=lambda result: one + result.C @ G,
        defect=lambda result: _defect(one + root @ result.C @ rows),
    )
    yield Contender(GRAM_EXPM, "peer", lambda: expm(JG), beside=GRAM)


def _skew_batch(count: int, m: int) -> Array:
    """Random skew matrices of 2-norm ANGLE."""
    A = np.random.default_rng(0).standard_normal((count, m, m))
    A -= np.matrix_transpose(A)
    return ANGLE / np.linalg.norm(A, 2, axis=(-2, -1), keepdims=True) * A


def _gram_batch(count: int, m: int) -> Array:
    """Gram matrices of random [U V], for which S has the 2-norm ANGLE."""
    X = np.random.default_rng(1).standard_normal((count, 4 * m, m))
    R = np.linalg.qr(X, mode="r")
    norm = np.linalg.norm(R @ _peers.apply_j(np.matrix_transpose(R)), 2, axis=(-2, -1))
    return (ANGLE / norm)[:, None, None] * (np.matrix_transpose(R) @ R)


def _defect(Q: Array) -> float:
    """The largest ‖QᵀQ − I‖₂ of a batch."""
    D = np.matrix_transpose(Q) @ Q - np.eye(Q.shape[-1])
    return float(np.linalg.norm(D, 2, axis=(-2, -1)).max())


def _judge_cores(timings: list[Timing]) -> Iterable[Target]:
    """The fourth row of the targets."""
    for t in timings:
        if t.name == EXPM:
            ratio, bound = t.ratio, 3 if t.size <= 8 else 1
            yield at_least(f"{EXPM} / {OURS}, m = {t.size}", ratio, bound)
    unit = float(np.finfo(np.float64).eps) / 2
    for t in timings:
        if t.defect is not None and t.kind == "ours":
            what = f"defect, m = {t.size}{t.name.removeprefix(OURS)} (bound 32 √m u)"
            yield at_most(what, t.defect / unit, 32 * math.sqrt(t.size), "u")


def _problems_study(plan: Plan) -> Study:
    """Many small problems in one call."""
    count, (n, r) = plan.problems, plan.small

    def contenders() -> Iterable[Contender]:
        from scipy.linalg import expm

        U, V, B = problem((count, n), r, 1)
        yield _ours(U, V, B)
        yield Contender(
            "one call for each",
            "peer",
            lambda: np.stack([skew_expm_multiply(U[i], V[i], B[i]) for i in range(count)]),
        )
        if not plan.extra_peers:
            return
        S = _peers.generator(U, V)
        yield _plain(U, V, B)
        yield Contender(f"{EXPM} of the batch, S formed", "peer", lambda: expm(S) @ B)

    title = f"{count:,} problems in one call: n = {n}, r = {r}, k = 1"
    return Study("batch", title, [Case(f"batch = {count:,}", count, contenders)])


def _attention_study(plan: Plan) -> Study:
    """A batch in attention's sizes, in single precision."""
    count, n, d = plan.attention
    flops = count * _flops(n, d, d)

    def contenders() -> Iterable[Contender]:
        U, V, B = (a.astype(np.float32) for a in problem((count, n), d, d))
        yield _ours(U, V, B, flops, "GFlop/s")
        yield _plain(U, V, B, flops, "GFlop/s")
        yield _stacked_gemm(count, n, d)

    def judge(timings: list[Timing]) -> Iterable[Target]:
        share = 100 * rate(timings, OURS) / rate(timings, STACK)
        yield at_least("share of the stacked matrix-product rate", share, 50, "%")

    title = f"a batch in attention sizes: ({count}, {n:,}, {d}), float32, operations as above"
    return Study("attention", title, [Case(f"batch = {count}", count, contenders)], judge)


def _grid_study(plan: Plan) -> Study:
    """Many values of t in one call, beside the pieces of work it is made of."""
    n, count = plan.grid
    cores = f"{count} small cores"

    def contenders() -> Iterable[Contender]:
        U, V, b = problem((n,), plan.rank)
        ts = np.linspace(0.0, 1.0, count)
        X = np.hstack([U, V])
        G = X.T @ X
        yield Contender(OURS, "ours", lambda: skew_expm_multiply(U, V, b, ts))
        yield Contender("one call", "part", lambda: skew_expm_multiply(U, V, b))
        yield Contender(cores, "part", lambda: core.skew(G, ts))
        yield Contender("writing the output", "part", lambda: _machine.write((count, n)))
        yield Contender(
            "one call for each",
            "peer",
            lambda: np.stack([skew_expm_multiply(U, V, b, t) for t in ts]),
        )

    def judge(timings: list[Timing]) -> Iterable[Target]:
        parts = sum(t.seconds for t in timings if t.kind == "part")
        what = f"{OURS} / (one call + {cores} + writing the output)"
        yield at_most(what, seconds(timings, OURS) / parts, 2)

    title = f"{count} values of t in one call: n = {n:,}, r = {plan.rank}, k = 1"
    return Study("grid", title, [Case(f"n = {n:,}", n, contenders)], judge)


def _scaling_study(plan: Plan, rates: dict[str, float], axis: Literal["r", "k"]) -> Study:
    """Time against r or k, beside the larger of what memory and products allow."""
    n = plan.scaling_rows

    def contenders(size: int) -> Iterable[Contender]:
        r, k = (size, 1) if axis == "r" else (plan.rank, size)
        U, V, B = problem((n,), r, k)
        flops, moved = _flops(n, r, k), _machine.sweep_bytes(U, B)
        limit = max(flops / rates[GEMM], moved / rates[READ]) / 1e9
        yield _ours(U, V, B, flops, "GFlop/s")
        yield Contender(ROOF, "limit", seconds=limit, work=flops, unit="GFlop/s")
        yield _plain(U, V, B, flops, "GFlop/s")

    fixed = "k = 1" if axis == "r" else f"r = {plan.rank}"
    cases = [Case(f"{axis} = {size}", size, partial(contenders, size)) for size in plan.widths]
    return Study(axis, f"scaling in {axis}: n = {n:,}, {fixed}", cases)


def _threads_study(plan: Plan) -> Study:
    """One thread beside all."""
    n, most = plan.judged_rows, _threads.threads()
    fewer = [1 << i for i in range(most.bit_length()) if 1 << i < most]

    def contenders() -> Iterable[Contender]:
        U, V, b = problem((n,), plan.rank)

        def call() -> Array:
            return skew_expm_multiply(U, V, b)

        prepare = partial(_threads.set_threads, most)
        yield Contender(OURS, "ours", call, prepare=prepare)
        for count in fewer:
            prepare = partial(_threads.set_threads, count)
            yield Contender(f"threads: {count}", "peer", call, prepare=prepare)

    title = f"scaling in threads: n = {n:,}, r = {plan.rank}, k = 1"
    return Study("threads", title, [Case(f"threads = {most}", most, contenders)])
