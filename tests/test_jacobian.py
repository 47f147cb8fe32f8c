"""Singular values of Jacobians, and the derivatives tried on the caller's data."""

from __future__ import annotations

import dataclasses
import json
import os
import pty
import subprocess
import sys

import numpy as np
import pytest

from lowrank_expm import LowRankSkew, _derivative_check, _jacobian, derivatives, verify
from lowrank_expm.verify import exponential_jacobian, jacobian_singular_values

from . import derivative_accuracy as accuracy
from . import generators as gen


def matrix(rows, columns, values):
    """A dense real matrix with the given singular values: a reflection on either side."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal(rows), rng.standard_normal(columns)
    M = np.zeros((rows, columns))
    np.fill_diagonal(M, values)
    M -= np.outer(x, x @ M) * (2 / (x @ x))
    return M - np.outer(M @ y, y) * (2 / (y @ y))


def spectrum_of(M, **options):
    return jacobian_singular_values(lambda x: M @ x, lambda y: M.T @ y, M.shape[1], **options)


# --- singular values -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "columns"), [(30, 30), (30, 12), (12, 30), (1, 5), (5, 1), (1, 1)]
)
def test_small_problems_are_decomposed(rows, columns):
    M = np.random.default_rng(1).standard_normal((rows, columns))
    values = np.linalg.svd(M, compute_uv=False)
    found = spectrum_of(M)
    k = min(3, rows, columns)
    assert found.exact
    assert found.shape == (rows, columns)
    assert found.largest == pytest.approx(values[:k])
    assert found.smallest == pytest.approx(values[::-1][:k])
    assert found.condition == pytest.approx(values[0] / values[-1])
    assert np.abs(np.array(found.largest) - values[:k]).max() <= found.error <= 1e-12 * values[0]


@pytest.mark.parametrize(("rows", "columns"), [(900, 900), (2000, 800), (800, 2000)])
def test_large_problems_are_iterated(rows, columns):
    side = min(rows, columns)
    values = np.concatenate([[9.0, 8.0, 7.5], np.linspace(2.0, 1.0, side - 6), [0.5, 0.2, 1e-3]])
    found = spectrum_of(matrix(rows, columns, values))
    assert not found.exact
    # Not one a row or column, as forming it would take.
    assert found.products < side
    high, low = np.array([9.0, 8.0, 7.5]), np.array([1e-3, 0.2, 0.5])
    assert np.abs(found.largest - high).max() <= found.error
    assert np.abs(found.smallest - low).max() <= found.error
    assert found.error <= 1e-6
    assert found.condition == pytest.approx(9e3, rel=1e-6)


def test_the_error_is_honest_where_the_square_hides_values():
    """1e-9 and 3e-9 have squares below u: they are seen, but mixed."""
    values = np.concatenate([[1.0], np.linspace(0.5, 0.4, 697), [3e-9, 1e-9]])
    found = spectrum_of(matrix(700, 700, values), k=2)
    gap = np.abs(found.smallest - np.array([1e-9, 3e-9])).max()
    assert 1e-11 < gap <= found.error <= 1e-6


def test_repeated_values_are_found_as_often_as_they_occur():
    values = np.concatenate([[3.0, 3.0], np.linspace(2.0, 1.0, 696), [0.1, 0.1]])
    found = spectrum_of(matrix(700, 700, values), k=2)
    assert found.largest == pytest.approx([3.0, 3.0])
    assert found.smallest == pytest.approx([0.1, 0.1])


def test_an_iteration_that_does_not_converge_says_so(monkeypatch):
    M = matrix(700, 700, np.linspace(1.0, 0.9, 700))
    found = spectrum_of(M, k=1)
    assert found.largest == pytest.approx([1.0])
    assert found.smallest == pytest.approx([0.9])
    monkeypatch.setattr(_jacobian, "RESTARTS", 1)
    with pytest.raises(np.linalg.LinAlgError, match="did not converge"):
        spectrum_of(M, k=1)


def test_a_singular_map_has_an_infinite_or_huge_condition():
    assert spectrum_of(np.diag([1.0, 0.0])).condition == np.inf
    assert spectrum_of(np.zeros((3, 3))).condition == np.inf
    assert spectrum_of(np.ones((3, 3))).condition > 1e15


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_maps_are_real_linear(dtype):
    """x ↦ Re(x) a is no complex-linear map, and conj has singular values 1."""
    a = np.arange(1, 4).astype(dtype) * (1 + 1j)
    found = jacobian_singular_values(
        lambda x: x.real * a, lambda y: (y * a.conj()).real.astype(dtype), (3,), dtype=dtype
    )
    assert found.shape == (6, 6)
    assert found.largest == pytest.approx([np.sqrt(18), np.sqrt(8), np.sqrt(2)], rel=1e-5)
    assert found.smallest == pytest.approx([0, 0, 0], abs=1e-6)
    conj = jacobian_singular_values(np.conj, np.conj, (2, 2), dtype=dtype)
    assert conj.largest == pytest.approx([1, 1, 1])
    assert conj.condition == pytest.approx(1)


def test_arrays_of_any_shape_and_precision():
    found = jacobian_singular_values(
        lambda x: 2 * x.T, lambda y: 2 * y.T, (2, 3), k=1, dtype=np.float32
    )
    assert found.largest == found.smallest == (2.0,)
    assert found.shape == (6, 6)
    counted = jacobian_singular_values(lambda x: x.sum(), lambda y: np.full((4,), y), 4)
    assert counted.largest == pytest.approx([2.0])
    assert counted.shape == (1, 4)


def test_the_result_is_frozen_readable_and_json():
    found = spectrum_of(np.diag([4.0, 2.0, 1.0]), k=2)
    assert [f.name for f in dataclasses.fields(found)] == [
        "largest",
        "smallest",
        "condition",
        "error",
        "exact",
        "shape",
        "products",
    ]
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.condition = 0.0
    assert json.loads(json.dumps(found.to_dict()))["largest"] == [4.0, 2.0]
    lines = str(found).splitlines()
    assert lines[0].startswith("Jacobian of 3 × 3, decomposed, ")
    assert [line.split()[0] for line in lines[1:]] == ["largest", "smallest", "condition", "error"]
    assert "4.000000e+00  2.000000e+00" in lines[1]


def test_maps_that_do_not_belong_together_are_refused():
    M = np.random.default_rng(0).standard_normal((5, 4))
    with pytest.raises(ValueError, match="vjp is not the adjoint of jvp"):
        jacobian_singular_values(lambda x: M @ x, lambda y: 2 * M.T @ y, 4)
    with pytest.raises(ValueError, match=r"vjp returned shape \(5,\), not \(4,\)"):
        jacobian_singular_values(lambda x: M @ x, lambda y: y, 4)
    with pytest.raises(ValueError, match="vjp returned complex128, not float64"):
        jacobian_singular_values(lambda x: M @ x, lambda y: 1j * (M.T @ y), 4)
    with pytest.raises(ValueError, match="jvp returned NaN or infinity"):
        jacobian_singular_values(lambda x: np.full(5, np.nan), lambda y: M.T @ y, 4)
    with pytest.raises(ValueError, match="no entries"):
        jacobian_singular_values(lambda x: x, lambda y: y, 0)
    with pytest.raises(TypeError, match="dtype is int64"):
        jacobian_singular_values(lambda x: x, lambda y: y, 2, dtype=int)


# --- the progress bar ------------------------------------------------------------------------

SLOW = """
import sys, time
import numpy as np
from lowrank_expm import _jacobian, verify
_jacobian.PATIENCE = float(sys.argv[1])
def slow(x):
    time.sleep(0.004)
    return x
print(verify.jacobian_singular_values(slow, slow, 40).condition)
"""


def shown_in_a_terminal(patience):
    """What a process with a terminal for standard error writes there, and its output."""
    leader, follower = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, patience], stdout=subprocess.PIPE, stderr=follower, env=env
    )
    os.close(follower)
    output = process.communicate(timeout=120)[0]
    shown = b""
    while True:
        try:
            part = os.read(leader, 1 << 16)
        except OSError:
            break
        if not part:
            break
        shown += part
    os.close(leader)
    assert process.returncode == 0, shown
    return shown.decode(), output.decode()


def test_a_bar_shows_in_a_terminal_once_it_takes_long():
    shown, output = shown_in_a_terminal("0.02")
    assert "singular values" in shown
    assert "products" in shown
    assert output == "1.0\n"


def test_no_bar_shows_for_what_is_quick_or_elsewhere(capsys):
    shown, output = shown_in_a_terminal("60")
    assert shown == ""
    assert output == "1.0\n"
    spectrum_of(np.eye(3))
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


# --- the Jacobian of the exponential ---------------------------------------------------------


def dense_jacobian(U, V, B, t, wrt):
    """Column by column, real and imaginary parts apart."""
    given = dict(zip("UVB", (U, V, B), strict=True))
    columns = []
    for name in given if wrt == "all" else wrt:
        a = given[name]
        for index in np.ndindex(*a.shape):
            for unit in (1, 1j) if a.dtype.kind == "c" else (1,):
                moved = {key: np.zeros_like(value) for key, value in given.items()}
                moved[name][index] = unit
                dY = derivatives.jvp(U, V, B, *moved.values(), t=t)[1].ravel()
                columns.append(np.concatenate([dY.real, dY.imag]) if dY.dtype.kind == "c" else dY)
    return np.stack(columns, axis=-1)


@pytest.mark.parametrize("kinds", ["ddd", "ddD", "DDD", "dDd", "FFF"])
@pytest.mark.parametrize("wrt", ["all", "U", "V", "B"])
@pytest.mark.parametrize("n", [3, 7])
def test_exponential_jacobian(n, wrt, kinds):
    rng = np.random.default_rng(2)
    shapes = ((n, 2), (n, 2), (n,))
    U, V, B = (gen.normal(rng, s, np.dtype(c)) for s, c in zip(shapes, kinds, strict=True))
    found = exponential_jacobian(U, V, B, 0.6, wrt=wrt, k=2)
    J = dense_jacobian(U, V, B, 0.6, wrt)
    values = np.linalg.svd(J, compute_uv=False)
    assert found.shape == J.shape
    assert np.abs(found.largest - values[:2]).max() <= 4 * found.error
    assert np.abs(found.smallest - values[::-1][:2]).max() <= 4 * found.error


def test_exponential_jacobian_of_batches_and_empty_problems():
    rng = np.random.default_rng(3)
    U, V, B = rng.standard_normal((3, 2, 5, 1))
    for arguments in ((U, V, B), (U[0], V[0], B), (U, V[0], B[0])):
        found = exponential_jacobian(*arguments, wrt="all")
        J = dense_jacobian(*arguments, 1.0, "all")
        assert found.largest == pytest.approx(np.linalg.svd(J, compute_uv=False)[:3])
    nothing = np.zeros((4, 0))
    assert exponential_jacobian(nothing, nothing, np.ones(4)).condition == pytest.approx(1.0)


def test_the_map_is_unitary_in_b_and_never_onto_in_u():
    rng = np.random.default_rng(4)
    U, V = rng.standard_normal((2, 40, 2))
    b = rng.standard_normal(40)
    assert exponential_jacobian(U, V, b, wrt="B").condition == pytest.approx(1.0)
    # The norm of Y does not change.
    assert exponential_jacobian(U, V, b, wrt="U", k=1).smallest[0] <= 1e-12
    both = exponential_jacobian(U, V, b)
    assert both.smallest[0] == pytest.approx(1.0)


def test_a_large_exponential_jacobian_is_iterated():
    rng = np.random.default_rng(5)
    U, V, B = rng.standard_normal((3, 900, 1)) / 30**0.5
    found = exponential_jacobian(U, V, B)
    small = found.smallest[0]
    assert not found.exact
    assert small == pytest.approx(1.0, abs=found.error + 1e-12)
    assert found.error <= 1e-9


def test_exponential_jacobian_refuses_what_it_cannot_do():
    x = np.array([1.0, 0.0])
    with pytest.raises(ValueError, match="wrt is 't'"):
        exponential_jacobian(x, x, x, wrt="t")
    with pytest.raises(ValueError, match="one t"):
        exponential_jacobian(x, x, x, [1.0, 2.0])
    with pytest.raises(ValueError, match="no entries"):
        exponential_jacobian(x, x, x[:, None][:, :0], wrt="B")


@pytest.mark.parametrize("n", [5, 2000])
def test_a_zero_map_has_zero_singular_values(n):
    zero = jacobian_singular_values(lambda x: 0 * x, lambda y: 0 * y, n, k=2)
    U, B = np.zeros((n, 2)), np.ones((n, 1))
    V = gen.normal(np.random.default_rng(0), (n, 2), "float64")
    still = exponential_jacobian(U, V, B, wrt="V", k=2)
    at_rest = exponential_jacobian(V, V[::-1], B, 0.0, wrt="U", k=2)
    for found in (zero, still, at_rest):
        assert found.largest == found.smallest == (0.0, 0.0)
        assert found.condition == np.inf


@pytest.mark.parametrize("n", [5, 700])
@pytest.mark.parametrize("size", [1e-200, 1e-300, 1e200])
def test_maps_of_any_size(n, size):
    A = np.linspace(1.0, 2.0, n)
    found = jacobian_singular_values(lambda x: size * A * x, lambda y: size * A * y, n, k=1)
    assert found.condition == pytest.approx(2.0, rel=1e-6)
    assert found.largest[0] == pytest.approx(2 * size, rel=1e-10)
    assert found.error <= 1e-6 * size
    with pytest.raises(ValueError, match="vjp is not the adjoint"):
        jacobian_singular_values(lambda x: size * A * x, lambda y: -size * A * y, n)


def test_a_map_of_rank_one_above_the_dense_size():
    a = np.zeros(2000)
    a[3] = 2.0
    found = jacobian_singular_values(lambda x: a * (a @ x), lambda y: a * (a @ y), 2000, k=2)
    assert found.largest[0] == pytest.approx(4.0)
    assert found.smallest[0] <= max(found.error, 1e-7)


@pytest.mark.parametrize("k", [0, -1, 1.5, True, "2", None])
def test_a_count_that_does_not_count_is_refused(k):
    with pytest.raises(ValueError, match=r"^k is .* positive integer"):
        jacobian_singular_values(lambda x: x, lambda y: y, 3, k=k)
    with pytest.raises(ValueError, match=r"^k is .* positive integer"):
        exponential_jacobian(np.eye(5, 2), np.eye(5, 2, -2), np.ones(5), k=k)


# --- check(derivatives=True) -----------------------------------------------------------------


@pytest.mark.parametrize("t", [1.0, [0.3, -2.0]])
@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("kind", sorted(accuracy.MAKERS))
def test_derivatives_pass_on_every_kind_of_input(kind, dtype, t):
    for n in (4, 9):
        U, V = accuracy.MAKERS[kind](np.random.default_rng(n), n, 2, dtype)
        report = verify.check(U, V, t=t, derivatives=True)
        assert report.passed, str(report)
        assert 0 <= report.adjoint_error <= 0.1 * report.adjoint_limit
        assert 0 <= report.difference_error <= 0.3 * report.difference_limit


def test_the_report_is_as_before_without_derivatives():
    U, V = gen.generic(np.random.default_rng(0), 20, 2, "float64")
    plain = verify.check(U, V)
    assert plain.adjoint_error is plain.difference_error is None
    assert plain.adjoint_limit is plain.difference_limit is None
    assert "derivatives" not in str(plain)
    full = verify.check(U, V, derivatives=True)
    assert type(full.adjoint_error) is type(full.difference_error) is float
    assert len(str(full).splitlines()) == len(str(plain).splitlines()) + 2
    assert json.loads(json.dumps(full.to_dict())) == full.to_dict()
    changed = {k for k, v in full.to_dict().items() if v != plain.to_dict()[k]}
    assert changed == {"adjoint_error", "difference_error", "adjoint_limit", "difference_limit"}


@pytest.mark.parametrize("argument", [0, 1, 2])
def test_a_wrong_cotangent_is_noticed(monkeypatch, argument):
    right = derivatives.vjp

    def wrong(*args, **options):
        Y, pullback = right(*args, **options)

        def spoilt(Ybar):
            bars = list(pullback(Ybar))
            bars[argument] = bars[argument] * (1 + 1e-6)
            return tuple(bars)

        return Y, spoilt

    monkeypatch.setattr(_derivative_check, "vjp", wrong)
    report = verify.check(*gen.generic(np.random.default_rng(0), 20, 2, "f8"), derivatives=True)
    assert not report.passed
    assert "TOO LARGE" in str(report)


@pytest.mark.parametrize("argument", [3, 4, 5])
def test_a_wrong_derivative_is_noticed(monkeypatch, argument):
    right = derivatives.jvp

    def wrong(*args, **options):
        args = list(args)
        args[argument] = args[argument] * (1 + 1e-5)
        return right(*args, **options)

    monkeypatch.setattr(_derivative_check, "jvp", wrong)
    report = verify.check(*gen.generic(np.random.default_rng(0), 20, 2, "f8"), derivatives=True)
    assert report.difference_error > report.difference_limit
    assert not report.passed


def test_derivatives_on_the_callers_b():
    U, V = gen.generic(np.random.default_rng(0), 20, 2, "float64")
    for B in (np.arange(20), np.ones((2, 20, 3)), np.zeros(20), 1e30 * np.ones(20)):
        assert verify.check(U, V, B, derivatives=True).passed
    assert verify.check(U, V, np.zeros((20, 0)), derivatives=True).passed
    assert verify.check(np.zeros((4, 0)), np.zeros((4, 0)), derivatives=True).passed


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_derivatives_of_unlike_sizes(dtype):
    """Columns, or vectors, whose squares leave the range of the dtype."""
    U, V = gen.generic(np.random.default_rng(0), 20, 2, dtype)
    B = gen.normal(np.random.default_rng(1), (20, 3), dtype)
    big = np.asarray(2.0 ** (0.8 * np.finfo(dtype).maxexp // 1), dtype)
    for args in ((U * big, V / big), (U / big, V * big), (U, V, B * big), (U, V, B / big)):
        report = verify.check(*args, derivatives=True)
        assert report.passed, str(report)
        assert report.difference_limit < 0.1
    U, V = U * big, V / big
    U[:, 0] = V[:, 1] = 0
    assert verify.check(U, V, t=3.0, derivatives=True).passed


def test_a_wrong_derivative_in_single_precision_is_noticed(monkeypatch):
    right = derivatives.jvp
    monkeypatch.setattr(
        _derivative_check, "jvp", lambda *a, **o: [y * np.float32(1.05) for y in right(*a, **o)]
    )
    U, V = gen.generic(np.random.default_rng(0), 200, 4, "float32")
    report = verify.check(U, V, derivatives=True)
    assert report.difference_error > report.difference_limit
    assert not report.passed


def test_what_an_angle_leaves_undecided_is_said():
    U, V = gen.generic(np.random.default_rng(0), 20, 2, "float32")
    report = verify.check(U, V, t=1e8, derivatives=True)
    assert report.adjoint_limit >= 1
    assert report.difference_limit >= 1
    lines = [line for line in str(report).splitlines() if "derivatives" in line]
    assert [line.split()[-1] for line in lines] == ["undecidable"] * 2
    assert "undecidable" not in str(verify.check(U, V, derivatives=True))


# --- odds and ends ----------------------------------------------------------------------------


def test_a_progress_watch_counts():
    watch = _jacobian._Watch()
    watch.tick()
    watch.expect(10)
    assert (watch.products, watch.total) == (1, 11)
    watch.close()


def test_operators_have_singular_values_too():
    """Any pair of maps will do: here those of an operator of the library."""
    Q = LowRankSkew(*gen.generic(np.random.default_rng(0), 50, 2, "complex128")).expm()
    found = jacobian_singular_values(lambda x: Q @ x, lambda y: Q.H @ y, 50, dtype=complex)
    assert found.condition == pytest.approx(1.0, abs=1e-13)
