"""The benchmark: that it checks, counts and reports rightly. Never how long anything takes."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import json
import math
import subprocess
import sys
import types

import numpy as np
import pytest

from lowrank_expm import _contest, _machine, _peers, _studies, _tables, _threads, bench, cli
from lowrank_expm import skew_expm_multiply as ours

PEERS = [
    _peers.plain_gram,
    _peers.orthonormal_basis,
    _peers.arnoldi,
    _peers.scipy_expm_multiply,
    _peers.dense,
    *([_peers.scipy_krylov] if _peers.has_scipy_krylov() else []),
]
PNG = b"\x89PNG\r\n"


@pytest.fixture(scope="module")
def results():
    """One run on tiny sizes, and what it told on the way."""
    told = []
    found = bench.run(bench.Plan.smoke(), lambda *step: told.append(step))
    return types.SimpleNamespace(results=found, told=told)


@pytest.fixture
def run(capsys, monkeypatch, results):
    """Call the command with the run already made; (status, output, errors)."""
    monkeypatch.setattr(bench, "run", lambda plan, progress=None: results.results)

    def call(*words):
        status = cli.main(["bench", *(str(word) for word in words)])
        return status, *capsys.readouterr()

    return call


# ------------------------------------------------------------------------------------- peers


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.__name__)
@pytest.mark.parametrize(("n", "r"), [(7, 1), (60, 2), (300, 8)])
def test_peers_compute_the_same(peer, n, r):
    U, V, b = _studies.problem((n,), r)
    y = ours(U, V, b)
    assert np.linalg.norm(peer(U, V, b) - y) <= 1e3 * 2**-53 * 3 * np.linalg.norm(y)


def test_arnoldi_stops_where_its_space_is_complete():
    """From a vector that S annihilates there is nothing to add."""
    U, V = np.eye(6)[:, :1], np.eye(6)[:, 1:2]
    b = np.eye(6)[:, 4]
    np.testing.assert_array_equal(_peers.arnoldi(U, V, b), b)


def test_the_plain_form_takes_batches():
    U, V, B = _studies.problem((3, 30), 2, 4)
    np.testing.assert_allclose(_peers.plain_gram(U, V, B), ours(U, V, B), rtol=0, atol=1e-13)


# ------------------------------------------------------------------------- the machine's limits


@pytest.mark.parametrize("size", [1, 17, _machine.CHUNK, 2 * _machine.CHUNK + 5])
def test_copy_copies_every_entry(size):
    a, out = np.arange(float(size)), np.zeros(size)
    _machine.copy(a, out)
    np.testing.assert_array_equal(out, a)


def test_reading_reads_every_entry():
    a, sums = np.arange(2.0 * _machine.CHUNK + 5), np.zeros(3)
    _machine._sum_chunks(0, 3, a, sums)
    assert sums.sum() == a.sum()


def test_filling_writes_every_entry():
    out = np.zeros(_machine.CHUNK + 3)
    _machine._fill_chunks(0, 1, 2.0, out)
    assert out.sum() == 2.0 * _machine.CHUNK
    _machine._fill_chunks(1, 2, 2.0, out)
    assert out.min() == 2.0


def test_bytes_of_two_sweeps():
    U, _, b = _studies.problem((10,), 3)
    assert _machine.sweep_bytes(U, b) == 8 * (4 * 30 + 3 * 10)


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")
def test_memory_of_a_call_is_measured_in_a_new_process():
    assert 0 <= _machine.extra_memory(1000, 2) < 64 * 2**20


def test_memory_that_cannot_be_measured_is_not_a_number(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert math.isnan(_machine.extra_memory(10, 1))


# ----------------------------------------------------------------------------------- contests


def contest(*contenders, plan=None, size=1, before=()):
    case = _contest.Case("n = 1", size, lambda: contenders)
    return _contest.compare(plan or bench.Plan.smoke(), case, before)


def contender(name, kind, value=1.0, **options):
    return _contest.Contender(name, kind, lambda: np.full(4, value), **options)


def test_a_peer_that_agrees_is_timed():
    mine, peer = contest(contender(bench.OURS, "ours"), contender("peer", "peer", 1 + 1e-14))
    assert mine.ratio == 1.0
    assert mine.difference is None
    assert peer.agrees
    assert peer.samples
    assert peer.difference == pytest.approx(1e-14, rel=0.1)


@pytest.mark.parametrize("wrong", [1 + 1e-11, math.nan, math.inf, -1.0])
def test_a_peer_that_differs_is_not(wrong):
    mine, peer = contest(contender(bench.OURS, "ours"), contender("peer", "peer", wrong))
    assert mine.samples
    assert not peer.agrees
    assert peer.samples == 0
    assert math.isnan(peer.seconds)
    assert math.isnan(peer.ratio)


def test_an_answer_of_another_shape_differs():
    peer = _contest.Contender("peer", "peer", lambda: np.ones((4, 1)))
    assert not contest(contender(bench.OURS, "ours"), peer)[1].agrees


def test_contenders_take_turns():
    calls = []

    def note(name):
        calls.append(name)
        return np.ones(1)

    def entrant(name, kind):
        return _contest.Contender(name, kind, lambda: note(name), prepare=lambda: note("rest"))

    contest(entrant(bench.OURS, "ours"), entrant("peer", "peer"))
    turns = [name for name in calls if name != "rest"]
    assert turns[-8:] == [bench.OURS, bench.OURS, "peer", "peer"] * 2  # untimed, timed
    assert calls[0] == "rest"


@pytest.mark.parametrize(
    ("kind", "times", "samples"),
    [
        ("peer", [3.0], [3.0]),  # very slow: the first call is the only one
        ("peer", [1.0, 0.9], [0.9]),  # slow
        ("peer", [1.0, 0.001], 7),  # slow the first time only
        ("ours", [3.0, 3.0], 2),
        ("ours", [3.0, 0.1], 5),
    ],
)
def test_slow_contenders_have_fewer_samples(monkeypatch, kind, times, samples):
    plan = dataclasses.replace(bench.Plan.smoke(), budget=0.5, repeats=7)
    later = iter(times[1:])
    monkeypatch.setattr(_contest, "_timed", lambda call: (None, next(later)))
    entry = _contest.Samples(contender("it", kind))
    _contest._plan_samples(plan, entry, times[0])
    assert (entry.times or entry.wanted) == samples
    assert next(later, None) is None


def test_a_computed_limit_is_not_called():
    mine, limit = contest(
        contender(bench.OURS, "ours"),
        _contest.Contender("limit", "limit", seconds=2.0, work=6e9, unit="GB/s"),
    )
    assert (limit.seconds, limit.rate, limit.samples) == (2.0, 3.0, 1)
    assert limit.ratio == 2.0 / mine.seconds


def test_a_slow_peer_is_left_out_beyond_the_judged_size():
    plan = bench.Plan.smoke()
    size = 10 * plan.judged_rows
    before = contest(
        contender(bench.OURS, "ours"),
        contender("slow", "peer"),
        contender("fast", "peer"),
        size=plan.judged_rows,
    )
    slow = [
        bench.Timing(**{**vars(t), "seconds": 1e3 if t.name == "slow" else 1e-6}) for t in before
    ]
    entrants = [contender(name, "peer") for name in ("slow", "fast", "new")]
    found = contest(contender(bench.OURS, "ours"), *entrants, size=size, before=slow)
    assert [t.name for t in found] == [bench.OURS, "fast"]


@pytest.mark.parametrize(
    ("judge", "value", "met"),
    [
        (_contest.at_most, 1.0, True),
        (_contest.at_most, 2.0, True),
        (_contest.at_most, 2.1, False),
        (_contest.at_most, math.nan, None),
        (_contest.at_least, 1.9, False),
        (_contest.at_least, 2.0, True),
        (_contest.at_least, math.nan, None),
    ],
)
def test_targets(judge, value, met):
    assert judge("what", value, 2.0).met is met


def test_steadiness_looks_at_sizes_past_the_caches(monkeypatch):
    def timing(n, seconds):
        limit = _contest.Contender(bench.OURS, "limit", seconds=seconds)
        return contest(limit, size=n)[0]

    timings = [timing(10, 1.0), timing(1000, 1.0), timing(2000, 2.5), timing(4000, 4.0)]
    plan = bench.Plan.smoke()
    monkeypatch.setattr(_machine, "cache_bytes", lambda: 1e3)
    found = _studies._steadiness(plan, timings)
    assert found.value == pytest.approx(25.0)
    assert "n = 1,000 to 4,000" in found.what
    monkeypatch.setattr(_machine, "cache_bytes", lambda: 1e9)
    assert _studies._steadiness(plan, timings).met is None


# -------------------------------------------------------------------------------------- the run


def test_all_answers_agree(results):
    assert results.results.agrees
    checked = [t for s in results.results.sections for t in s.timings if t.kind == "peer"]
    assert len(checked) > 20
    assert all(t.difference is not None and t.samples for t in checked)


def test_the_run_has_all_studies(results):
    keys = [section.key for section in results.results.sections]
    assert keys == [
        "machine", "n", "wide", "latency", "core", "batch", "attention", "grid", "r", "k", "threads"
    ]  # fmt: skip


def test_every_row_of_numpy_has_a_target(results):
    targets = [t.what for s in results.results.sections for t in s.targets]
    words = ("write y once", bench.PLAIN, bench.QR, bench.ARNOLDI, bench.EXPM_MULTIPLY)
    words += ("matrix-product", "S formed", "defect", "time per row", "memory", "small cores")
    for word in words:
        assert any(word in what for what in targets), word


def test_cores_are_orthogonal(results):
    core = next(s for s in results.results.sections if s.key == "core")
    defects = [t for t in core.targets if "defect" in t.what]
    assert len(defects) == 2 * len(bench.Plan.smoke().cores)
    assert all(t.met for t in defects)


def test_progress_is_told_step_by_step(results):
    done, total = [step[1] for step in results.told], results.told[-1][2]
    assert done == list(range(total + 1))
    assert results.told[-1][0] == "done"


def test_the_number_of_threads_is_put_back(results):
    assert _threads.threads() == results.results.machine["threads"]


def test_the_machine_is_described(results):
    wanted = {"processor", "threads", "python", "lowrank_expm", "numpy", "scipy", "numba", "blas"}
    assert wanted <= set(results.results.machine)
    assert all(results.results.machine[name] for name in wanted)


def test_plans_differ_in_effort_only():
    full, quick = bench.Plan.full(), bench.Plan.quick()
    assert full.judged_rows == quick.judged_rows == 1_000_000
    assert full.rows[-1] == 10_000_000
    assert set(quick.cores) == {4, 8, 16, 32, 64, 128}
    for plan in (full, quick, bench.Plan.smoke()):
        assert plan.judged_rows in plan.rows
        assert list(plan.rows) == sorted(plan.rows)


# --------------------------------------------------------------------------------- the command


def test_plain_text_in_a_pipe(run, results):
    status, out, err = run("--quick")
    assert (status, err) == (0, "")
    assert "\x1b" not in out
    assert all(section.title in out for section in results.results.sections)
    assert "all answers agree" in out
    assert all(word in out for word in ("at most 2.5 ×", "at least 40 ×", " met", "numpy"))


def test_json_is_valid_and_complete(run, results):
    status, out, err = run("--json")
    assert (status, err) == (0, "")
    data = json.loads(out, parse_constant=pytest.fail)
    assert data["agrees"] is True
    assert [s["key"] for s in data["sections"]] == [s.key for s in results.results.sections]
    timing = data["sections"][1]["timings"][0]
    assert timing["name"] == "lowrank_expm"
    assert timing["low"] <= timing["seconds"] <= timing["high"]


def test_rich_tables_in_a_terminal(results):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    file = Terminal()
    _tables.print_rich(results.results, file)
    assert "targets" in file.getvalue()
    assert "all answers agree" in file.getvalue()


def test_an_answer_that_differs_is_status_1(run, monkeypatch):
    timings = contest(contender(bench.OURS, "ours"), contender("peer", "peer", 2.0))
    section = _contest.section(_contest.Study("n", "a study", []), timings)
    machine = {"processor": "P", "threads": 1, "load at the start": 9.0}
    wrong = bench.Results(machine, (section,), 1.0)
    monkeypatch.setattr(bench, "run", lambda plan, progress=None: wrong)
    status, out, _ = run()
    assert status == 1
    assert "DIFFERS 1.0e+00" in out
    assert "AN ANSWER DIFFERS" in out
    assert "not counted" in out
    assert "busy" in out
    assert run("--json")[0] == 1


def test_options_reach_the_plan(monkeypatch, capsys, results):
    plans = []

    def note(plan, progress=None):
        plans.append(plan)
        return results.results

    monkeypatch.setattr(bench, "run", note)
    for words in ((), ("--quick",), ("--quick", "--repeats", "3")):
        assert cli.main(["bench", *words]) == 0
    assert plans[:2] == [bench.Plan.full(), bench.Plan.quick()]
    assert plans[2].repeats == 3


def test_plot_writes_a_picture(run, tmp_path):
    picture = tmp_path / "speed.png"
    assert run("--plot", picture)[0] == 0
    assert picture.read_bytes().startswith(PNG)
    assert [path.name for path in tmp_path.iterdir()] == ["speed.png"]


@pytest.mark.parametrize(("format", "start"), [("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_other_formats(run, tmp_path, format, start):
    picture = tmp_path / f"speed.{format}"
    assert run("--plot", picture)[0] == 0
    assert picture.read_bytes().startswith(start)


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        (("--plot", "speed.txt"), ".png"),
        (("--plot", "missing/speed.png"), "no directory"),
        (("--repeats", "0"), "whole number"),
        (("--nonsense",), "unrecognized"),
    ],
)
def test_wrong_use_is_one_line_and_status_2(run, words, fragment):
    status, out, err = run(*words)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert fragment in err


def test_a_missing_matplotlib_is_told_before_the_run(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else find(name)
    )
    monkeypatch.setattr(bench, "run", lambda *a: pytest.fail("was run"))
    assert cli.main(["bench", "--plot", "speed.png"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "pip install" in err


def test_importing_the_package_loads_no_benchmark():
    names = ("bench", "_peers", "_machine", "_contest", "_studies", "_tables")
    script = (
        "import sys, lowrank_expm, lowrank_expm.cli\n"
        f"print(*[n for n in {names!r} if 'lowrank_expm.' + n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=str(_machine.Path(_machine.__file__).parents[1]),
    )
    assert done.stdout.split() == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (123.4, "123 s"),
        (12.34, "12.3 s"),
        (1.0, "1.00 s"),
        (0.01234, "12.3 ms"),
        (0.99994e-3, "1.00 ms"),
        (45.6e-6, "45.6 µs"),
        (3.21e-9, "3.21 ns"),
        (0.0, "0 ns"),
    ],
)
def test_durations(seconds, text):
    assert _tables.duration(seconds) == text
