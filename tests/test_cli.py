"""The command line: what it writes, prints and returns, and what it leaves behind when stopped."""

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import lowrank_expm
from lowrank_expm import cli

N, R, K = 60, 3, 2
SUBPROCESS_SECONDS = 120  # generous: the first import of a slow machine

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc or /dev")


@pytest.fixture
def arrays():
    """Give generic U, V and B."""
    generator = np.random.default_rng(7)
    return {
        "U": generator.standard_normal((N, R)) / 8,
        "V": generator.standard_normal((N, R)) / 8,
        "B": generator.standard_normal((N, K)),
    }


@pytest.fixture
def files(tmp_path, monkeypatch, arrays):
    """Write U.npy, V.npy and B.npy into a new current directory, this package importable there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(lowrank_expm.__file__).parents[1]))
    for name, array in arrays.items():
        np.save(f"{name}.npy", array)
    return tmp_path


@pytest.fixture
def run(capsys):
    """Call main and give (exit status, standard output, standard error)."""

    def call(*words):
        status = cli.main([str(word) for word in words])
        return status, *capsys.readouterr()

    return call


APPLY = ("apply", "U.npy", "V.npy", "B.npy", "-o", "Y.npy")
VERIFY = ("verify", "U.npy", "V.npy")
INPUTS = {"U.npy", "V.npy", "B.npy"}


def names(directory):
    return {path.name for path in Path(directory).iterdir()}


def assert_one_line_error(result, *fragments):
    status, out, err = result
    assert status == 2
    assert out == ""
    assert re.fullmatch(r"lowrank-expm: error: [^\n]+\n", err), err
    for fragment in fragments:
        assert fragment in err


def command(*words):
    return [sys.executable, "-m", "lowrank_expm", *words]


def start_program(*words, **options):
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    return subprocess.run(command(*words), timeout=SUBPROCESS_SECONDS, **options)


# ------------------------------------------------------------------------------------- apply


def test_apply_writes_what_the_library_computes(files, run, arrays):
    assert run(*APPLY) == (0, "", "")
    Y = np.load("Y.npy")
    expected = lowrank_expm.skew_expm_multiply(**arrays)
    assert Y.dtype == np.float64
    np.testing.assert_array_max_ulp(np.linalg.norm(Y, axis=0), np.linalg.norm(expected, axis=0), 64)
    np.testing.assert_allclose(Y, expected, rtol=0, atol=1e2 * np.finfo(float).eps)
    assert names(files) == INPUTS | {"Y.npy"}


@pytest.mark.parametrize("words", [("-t", "-1.5"), ("-t=-15e-1",), ("-t", "-15e-1"), ("-t-1.5",)])
def test_negative_times_are_numbers_not_options(files, run, arrays, words):
    assert run(*APPLY, *words) == (0, "", "")
    expected = lowrank_expm.skew_expm_multiply(**arrays, t=-1.5)
    np.testing.assert_allclose(np.load("Y.npy"), expected, rtol=0, atol=1e2 * np.finfo(float).eps)


def test_time_zero_copies_b(files, run, arrays):
    assert run(*APPLY, "-t", 0)[0] == 0
    assert np.array_equal(np.load("Y.npy"), arrays["B"])


@pytest.mark.parametrize("method", ["auto", "gram", "qr", "direct"])
def test_every_method_is_taken_to_the_library(files, run, arrays, method):
    assert run(*APPLY, "--method", method) == (0, "", "")
    expected = lowrank_expm.skew_expm_multiply(**arrays, method=method)
    np.testing.assert_allclose(np.load("Y.npy"), expected, rtol=0, atol=1e2 * np.finfo(float).eps)


@pytest.mark.parametrize(
    ("shapes", "dtypes", "expected"),
    [
        ([(N, R), (N, R), (N, K)], "fff", "f"),
        ([(N, R), (N, R), (N, K)], "ffd", "d"),
        ([(N, R), (N, R), (N, K)], "fFf", "F"),
        ([(N, R), (N, R), (N, K)], "dFd", "D"),
        ([(N, R), (N, R), (N, K)], "iii", "d"),
        ([(N, R), (N, R), (N, K)], "fif", "d"),
        ([(N,), (N,), (N,)], "ddd", "d"),
        ([(N, R), (N, R), (N,)], "ddd", "d"),
        ([(4, N, R), (N, R), (5, 1, N, K)], "ddd", "d"),
        ([(2, N, R), (2, N, R), (N,)], "ddd", "d"),
        ([(N, R), (N, R), (N, 0)], "ddd", "d"),
        ([(N, 0), (N, 0), (N, K)], "ddd", "d"),
        ([(0, R), (0, R), (0, K)], "ddd", "d"),
        ([(0, N, R), (N, R), (N, K)], "ddd", "d"),
        ([(4, R), (4, R), (4, K)], "ddd", "d"),
    ],
)
def test_shape_and_dtype_of_the_result_are_the_librarys(files, run, shapes, dtypes, expected):
    generator = np.random.default_rng(3)
    arrays = [
        (2 * generator.standard_normal(shape)).astype(dtype)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    for name, array in zip("UVB", arrays, strict=True):
        np.save(f"{name}.npy", array)
    assert run(*APPLY, "-t", 0.01) == (0, "", "")
    Y, direct = np.load("Y.npy"), lowrank_expm.skew_expm_multiply(*arrays, 0.01)
    assert Y.dtype == direct.dtype == np.dtype(expected)
    assert Y.shape == direct.shape
    tolerance = 1e3 * np.finfo(Y.dtype).eps
    np.testing.assert_allclose(Y, direct, rtol=0, atol=tolerance)


@pytest.mark.parametrize("save", [np.asfortranarray, lambda x: x.astype(">f8")])
def test_other_storage_orders(files, run, arrays, save):
    for name, array in arrays.items():
        np.save(f"{name}.npy", save(array))
    assert run(*APPLY) == (0, "", "")
    expected = lowrank_expm.skew_expm_multiply(**arrays)
    np.testing.assert_allclose(np.load("Y.npy"), expected, rtol=0, atol=1e2 * np.finfo(float).eps)


def test_files_of_many_blocks(files, run):
    generator = np.random.default_rng(11)
    n = 300_000
    arrays = [generator.standard_normal(shape) / n**0.5 for shape in [(n, 4), (n, 4), (n,)]]
    for name, array in zip("UVB", arrays, strict=True):
        np.save(f"{name}.npy", array)
    before = {name: Path(name).read_bytes() for name in INPUTS}
    assert run(*APPLY) == (0, "", "")
    expected = lowrank_expm.skew_expm_multiply(*arrays)
    assert np.linalg.norm(np.load("Y.npy") - expected) <= 1e2 * np.finfo(float).eps
    assert before == {name: Path(name).read_bytes() for name in INPUTS}


def test_the_arrays_are_mapped_not_read(files, run, monkeypatch):
    seen = {}

    def spy(U, V, B, t, *, method, out):
        seen.update(U=U, V=V, B=B, out=out)
        out[...] = 0
        return out

    monkeypatch.setattr(lowrank_expm, "skew_expm_multiply", spy)
    assert run(*APPLY)[0] == 0
    assert all(isinstance(array, np.memmap) for array in seen.values())
    assert [seen[name].mode for name in ("U", "V", "B")] == ["r", "r", "r"]


@pytest.mark.parametrize("target", ["U.npy", "V.npy", "B.npy"])
def test_output_may_be_an_input(files, run, arrays, target):
    words = [*APPLY[:-1], target]
    assert run(*words, "--verify")[0] == 0
    expected = lowrank_expm.skew_expm_multiply(**arrays)
    np.testing.assert_allclose(np.load(target), expected, rtol=0, atol=1e2 * np.finfo(float).eps)
    assert names(files) == INPUTS


def test_existing_output_is_replaced_and_keeps_its_mode(files, run, arrays):
    Path("Y.npy").write_text("old")
    os.chmod("Y.npy", 0o640)
    assert run(*APPLY) == (0, "", "")
    assert np.load("Y.npy").shape == arrays["B"].shape
    assert os.stat("Y.npy").st_mode & 0o777 == 0o640


def test_output_through_a_symbolic_link_keeps_the_link(files, run):
    Path("real").mkdir()
    Path("Y.npy").symlink_to("real/Y.npy")
    assert run(*APPLY) == (0, "", "")
    assert Path("Y.npy").is_symlink()
    assert names("real") == {"Y.npy"}


def test_apply_verify_adds_the_report(files, run):
    status, out, err = run(*APPLY, "--verify")
    assert (status, err) == (0, "")
    assert "defect" in out
    assert Path("Y.npy").exists()


@pytest.mark.parametrize("words", [(*APPLY, "--verify"), VERIFY, (*VERIFY, "--json")])
def test_status_one_if_the_report_does_not_pass(files, run, monkeypatch, words):
    failed(monkeypatch)
    status, out, err = run(*words)
    assert (status, err) == (1, "")
    assert out


def failed(monkeypatch):
    """Let every verification fail."""
    monkeypatch.setattr("lowrank_expm.verify.check", lambda *args, **options: FailedReport())


class FailedReport:
    """A report as a wrong operator would give it."""

    passed = False
    angle = 1.0

    def to_dict(self):
        return {
            "passed": np.bool_(False),
            "defect": float("nan"),
            "basis_condition": np.float64("inf"),
            "norm_drift": np.array([1.0, np.inf]),
            "route": ("gram", None),
        }

    def __str__(self):
        return "defect ‖QᴴQ − I‖  nan"


# ------------------------------------------------- nothing half-written under the output's name


@pytest.mark.parametrize("existing", [None, b"the old file"])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("U contains NaN"), 2),
        (MemoryError(), 2),
        (OSError(28, "No space left on device"), 2),
        (KeyboardInterrupt(), 130),
    ],
)
def test_a_failure_leaves_no_trace(files, run, monkeypatch, existing, error, status):
    def fail_halfway(U, V, B, t, *, method, out):
        out[:10] = 1.0
        assert len(names(files) - INPUTS - {"Y.npy"}) == 1
        raise error

    if existing is not None:
        Path("Y.npy").write_bytes(existing)
    monkeypatch.setattr(lowrank_expm, "skew_expm_multiply", fail_halfway)
    result, out, err = run(*APPLY)
    assert (result, out) == (status, "")
    assert re.fullmatch(r"lowrank-expm: error: [^\n]+\n", err)
    assert names(files) == INPUTS | ({"Y.npy"} if existing else set())
    assert existing is None or Path("Y.npy").read_bytes() == existing


# Signals as a terminal leaves them: a suite started in the background inherits some ignored.
SLOW_APPLY = """
import signal, sys, time, lowrank_expm
from lowrank_expm.cli import main

signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

def halfway(U, V, B, t, *, method, out):
    out[:10] = 1.0
    print("halfway", flush=True)
    time.sleep(60)

lowrank_expm.skew_expm_multiply = halfway
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130), (signal.SIGKILL, -9)],
)
def test_a_stopped_run_leaves_the_old_file(files, number, status):
    Path("Y.npy").write_bytes(b"the old file")
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_APPLY, *APPLY],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout.readline() == "halfway\n"
        process.send_signal(number)
        _, err = process.communicate(timeout=SUBPROCESS_SECONDS)
    assert process.returncode == status
    assert Path("Y.npy").read_bytes() == b"the old file"
    left = names(files) - INPUTS - {"Y.npy"}
    if number == signal.SIGKILL:
        assert all(name.startswith(".lowrank-expm-") for name in left)
    else:
        assert left == set()
        assert re.fullmatch(r"lowrank-expm: error: [^\n]+\n", err)


def test_signal_handlers_are_put_back(files, run):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    assert run(*APPLY)[0] == 0
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == before


def test_apply_outside_the_main_thread(files):
    status = []
    thread = threading.Thread(target=lambda: status.append(cli.main(APPLY)))
    thread.start()
    thread.join()
    assert status == [0]


def test_a_full_disk_is_an_error_not_a_crash(files):
    """A file size limit stands for the full disk: both fail when space is reserved."""
    lines = "import resource, sys; from lowrank_expm.cli import main;"
    lines += "resource.setrlimit(resource.RLIMIT_FSIZE, (512, resource.RLIM_INFINITY));"
    lines += "sys.exit(main(sys.argv[1:]))"
    result = subprocess.run(
        [sys.executable, "-c", lines, *APPLY],
        capture_output=True,
        text=True,
        timeout=SUBPROCESS_SECONDS,
    )
    assert_one_line_error((result.returncode, result.stdout, result.stderr), "Y.npy", "written")
    assert names(files) == INPUTS


def test_space_that_cannot_be_reserved_is_reported(files, run, monkeypatch):
    def full(descriptor, offset, length):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    assert_one_line_error(run(*APPLY), "Y.npy", "No space left on device")
    assert names(files) == INPUTS


def test_file_systems_without_reservation_are_used(files, run, monkeypatch):
    def unsupported(descriptor, offset, length):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported, raising=False)
    assert run(*APPLY) == (0, "", "")
    monkeypatch.delattr(os, "posix_fallocate")
    assert run(*APPLY) == (0, "", "")


# -------------------------------------------------------------------------------- wrong files


class Malicious:
    """An object whose unpickling creates a file."""

    def __reduce__(self):
        return os.mkdir, ("unpickled",)


def object_array(path):
    np.save(path, np.array([Malicious(), 1], dtype=object), allow_pickle=True)


def bare_pickle(path):
    path.write_bytes(pickle.dumps(Malicious()))


def npz_archive(path):
    with path.open("wb") as file:
        np.savez(file, U=np.ones(3))


def truncated(path):
    np.save(path, np.ones((N, R)))
    path.write_bytes(path.read_bytes()[:-8])


def truncated_header(path):
    np.save(path, np.ones((N, R)))
    path.write_bytes(path.read_bytes()[:40])


def header(text, length=None):
    """Write a version-1 header with any text."""

    def write(path):
        body = text.encode("latin1")
        size = (len(body) if length is None else length).to_bytes(2, "little")
        path.write_bytes(b"\x93NUMPY\x01\x00" + size + body + bytes(64))

    return write


DAMAGED_HEADERS = {
    "negative shape": header("{'descr': '<f8', 'fortran_order': False, 'shape': (-3, 2), }\n"),
    "huge shape": header("{'descr': '<f8', 'fortran_order': False, 'shape': (9" + "0" * 40 + ",)}"),
    "wrapping shape": header(
        "{'descr': '<f8', 'fortran_order': False, 'shape': (4294967296, 4294967296), }\n"
    ),
    "no descr": header("{'fortran_order': False, 'shape': (3, 2), }\n"),
    "bad descr": header("{'descr': 'nonsense', 'fortran_order': False, 'shape': (3, 2), }\n"),
    "code": header("__import__('os').mkdir('unpickled')\n"),
    "open bracket": header("{'descr': ((((((\n"),
    "deep": header("(" * 9000),
    "not utf8": header("\xff\xfe\x00"),
    "too long": header("{}", 60000),
    "version 9": lambda path: path.write_bytes(b"\x93NUMPY\x09\x00" + bytes(100)),
}

WRONG_FILES = {
    "missing": lambda path: None,
    "directory": lambda path: path.mkdir(),
    "pipe": lambda path: os.mkfifo(path),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("1 2 3\n4 5 6\n"),
    "only magic": lambda path: path.write_bytes(b"\x93NUMPY"),
    "npz": npz_archive,
    "pickle": bare_pickle,
    "objects": object_array,
    "truncated": truncated,
    "truncated header": truncated_header,
    "strings": lambda path: np.save(path, np.full((N, R), "x")),
    "dates": lambda path: np.save(path, np.zeros((N, R), "M8[s]")),
    "records": lambda path: np.save(path, np.zeros((N, R), [("a", "f8"), ("b", "f8")])),
    "loop": lambda path: path.symlink_to(path.name),
    **DAMAGED_HEADERS,
}


@pytest.mark.parametrize("name", ["U.npy", "V.npy", "B.npy"])
@pytest.mark.parametrize("kind", WRONG_FILES)
def test_a_wrong_file_is_one_line_and_status_two(files, run, name, kind):
    Path(name).unlink()
    WRONG_FILES[kind](Path(name))
    assert_one_line_error(run(*APPLY), name)
    assert_one_line_error(run(*VERIFY, "B.npy"), name)
    assert names(files) <= INPUTS  # no output, nothing unpickled


WRONG_ARRAYS = {
    "n differs": ("U", np.ones((N + 1, R))),
    "r differs": ("V", np.ones((N, R + 1))),
    "n of B differs": ("B", np.ones((N + 1, K))),
    "n of a vector differs": ("B", np.ones(N - 1)),
    "batches differ": ("B", np.ones((3, N, K))),
    "U is a scalar": ("U", np.float64(3.0)),
    "V is a scalar": ("V", np.float64(3.0)),
    "B is a scalar": ("B", np.float64(3.0)),
    "U is a vector": ("U", np.ones(N)),
    "longdouble": ("U", np.ones((N, R), np.longdouble)),
    "NaN in U": ("U", np.where(np.arange(N * R).reshape(N, R) == 7, np.nan, 1.0)),
    "infinity in V": ("V", np.where(np.arange(N * R).reshape(N, R) == 7, np.inf, 1.0)),
    "NaN in B": ("B", np.where(np.arange(N * K).reshape(N, K) == 7, np.nan, 1.0)),
    "infinity in B": ("B", np.where(np.arange(N * K).reshape(N, K) == 7, -np.inf, 1.0)),
    "overflow": ("U", np.full((N, R), 1e305)),
}


@pytest.mark.parametrize("kind", WRONG_ARRAYS)
def test_a_wrong_array_is_one_line_and_status_two(files, run, kind):
    name, array = WRONG_ARRAYS[kind]
    if kind == "batches differ":
        np.save("U.npy", np.ones((2, N, R)))
    if kind == "overflow":
        np.save("V.npy", array)
    np.save(f"{name}.npy", array)
    assert_one_line_error(run(*APPLY))
    assert_one_line_error(run(*VERIFY, "B.npy"))
    assert names(files) == INPUTS


def test_a_file_that_may_not_be_read(files, run, monkeypatch):
    def forbidden(path, *args, **options):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("builtins.open", forbidden)
    assert_one_line_error(run(*APPLY), "U.npy: Permission denied")


def test_batch_axes_name_all_three_shapes(files, run):
    np.save("U.npy", np.ones((2, N, R)))
    np.save("B.npy", np.ones((3, N, K)))
    assert_one_line_error(run(*APPLY), str((2, N, R)), str((3, N, K)))


def test_wrong_outputs(files, run):
    Path("folder").mkdir()
    os.mkfifo("fifo")
    for target in ["folder", "folder/", "new/", "missing/Y.npy", "fifo", "/dev/null", ""]:
        assert_one_line_error(run(*APPLY[:-1], target))
    assert_one_line_error(run(*APPLY[:-1], "missing/Y.npy"), "missing")
    assert names(files) == INPUTS | {"folder", "fifo"}


def test_a_write_protected_output_is_kept(files, run, monkeypatch):
    Path("Y.npy").write_bytes(b"precious")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everything
    assert_one_line_error(run(*APPLY), "write-protected")
    assert Path("Y.npy").read_bytes() == b"precious"


def test_a_directory_that_may_not_be_written(files, run, monkeypatch):
    def forbidden(path, shape, dtype):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(cli, "_create", forbidden)
    result = run(*APPLY)
    assert_one_line_error(result, "Y.npy: cannot be written: Permission denied")
    assert ".tmp" not in result[2]


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("nonsense",),
        ("apply",),
        ("apply", "U.npy", "V.npy", "B.npy"),
        ("verify", "U.npy"),
        ("verify", "U.npy", "V.npy", "B.npy", "more.npy"),
        (*APPLY, "-t", "inf"),
        (*APPLY, "-t", "-inf"),
        (*APPLY, "-t", "nan"),
        (*APPLY, "-t", "1e999"),
        (*APPLY, "-t", "1j"),
        (*APPLY, "-t"),
        (*APPLY, "--method", "cholesky"),
        (*APPLY, "--verif"),
        ("demo", "--n", "0"),
        ("demo", "--n", "-5"),
        ("demo", "--n", "1.5"),
        ("demo", "--n", "inf"),
        ("demo", "--r", "many"),
        ("demo", "--seed", "-1"),
    ],
)
def test_wrong_words_are_one_line_and_status_two(files, run, words):
    assert_one_line_error(run(*words))
    assert names(files) == INPUTS


# ------------------------------------------------------------------------------------- verify


@pytest.mark.parametrize("words", [(), ("B.npy",), ("-t", "-1e3"), ("B.npy", "--method", "qr")])
def test_verify_prints_the_report(files, run, words):
    status, out, err = run(*VERIFY, *words)
    assert (status, err) == (0, "")
    assert "defect" in out
    assert names(files) == INPUTS


def test_verify_tries_the_derivatives_where_asked(files, run):
    for words in ((), ("B.npy",)):
        status, out, err = run(*VERIFY, *words, "--derivatives")
        assert (status, err) == (0, "")
        assert out.count("derivatives: ") == 2
    report = json.loads(run(*VERIFY, "--derivatives", "--json")[1])
    assert 0 <= report["adjoint_error"] <= report["adjoint_limit"]
    assert "derivatives: " not in run(*VERIFY)[1]


@pytest.mark.parametrize("words", [(), ("B.npy",)])
def test_verify_json_is_the_report(files, run, arrays, words):
    status, out, err = run(*VERIFY, *words, "--json")
    assert (status, err) == (0, "")
    report = json.loads(out, parse_constant=pytest.fail)
    expected = lowrank_expm.verify.check(arrays["U"], arrays["V"], arrays["B"] if words else None)
    assert report["passed"] is True
    assert set(report) == set(expected.to_dict())
    assert report["route"] == expected.route
    assert report["angle"] == pytest.approx(float(expected.angle))


@pytest.mark.parametrize(
    ("U", "V"),
    [
        (np.zeros((N, R)), np.zeros((N, R))),  # an infinite condition of the basis
        (np.ones((N, R)), np.ones((N, R))),
        (np.ones((0, R)), np.ones((0, R))),
        (np.ones((N, 0)), np.ones((N, 0))),
        (np.ones((2, N, R)) / N, np.ones((2, N, R)) / N),
    ],
)
def test_json_is_valid_for_degenerate_input(files, run, U, V):
    np.save("U.npy", U)
    np.save("V.npy", V)
    status, out, err = run(*VERIFY, "--json")
    assert (status, err) == (0, "")
    assert json.loads(out, parse_constant=pytest.fail)["passed"] in (True, [True, True])


def test_json_has_null_for_what_is_not_finite(files, run, monkeypatch):
    failed(monkeypatch)
    status, out, _ = run(*VERIFY, "--json")
    assert status == 1
    assert json.loads(out, parse_constant=pytest.fail) == {
        "passed": False,
        "defect": None,
        "basis_condition": None,
        "norm_drift": [1.0, None],
        "route": ["gram", None],
    }


# --------------------------------------------------------------------------------------- demo


def test_demo_verifies_and_compares(run):
    status, out, err = run("demo", "--n", 2000, "--r", 2)
    assert (status, err) == (0, "")
    for text in ["n = 2,000, r = 2", "defect", "scipy.sparse.linalg.expm_multiply", "warm-up"]:
        assert text in out
    assert out.endswith("verified\n")
    assert "NOT" not in out


@pytest.mark.parametrize("words", [("--n", 5), ("--n", 1, "--r", 1), ("--n", "3e3", "--seed", 9)])
def test_demo_of_other_sizes(run, words):
    assert run("demo", *words)[0] == 0


def test_demo_has_a_fixed_seed():
    first, second, other = (cli._demo_problem(50, 2, seed) for seed in (0, 0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert not np.array_equal(first[0], other[0])


def test_demo_fails_if_the_report_does_not_pass(run, monkeypatch):
    failed(monkeypatch)
    status, out, _ = run("demo", "--n", 500)
    assert status == 1
    assert out.endswith("NOT VERIFIED\n")


@pytest.mark.parametrize("wrong", [1 + 1e-9, np.nan])
def test_demo_fails_if_scipy_disagrees(run, monkeypatch, wrong):
    right = cli._scipy_expm_multiply
    monkeypatch.setattr(cli, "_scipy_expm_multiply", lambda U, V, b: right(U, V, b) * wrong)
    status, out, _ = run("demo", "--n", 500)
    assert status == 1
    assert out.endswith("NOT VERIFIED\n")


def test_demo_that_needs_too_much_memory(run):
    status, _, err = run("demo", "--n", "1e15")
    assert status == 2
    assert re.fullmatch(r"lowrank-expm: error: not enough memory[^\n]*\n", err)


# ------------------------------------------------------------- pipes, terminals and the program


def test_help_teaches_by_examples(capsys):
    for words in [["--help"], ["demo", "--help"], ["apply", "--help"], ["verify", "--help"]]:
        with pytest.raises(SystemExit) as stop:
            cli.main(words)
        assert stop.value.code == 0
        out = capsys.readouterr().out
        assert "  lowrank-expm " in out
        assert max(map(len, out.splitlines())) <= 100


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"lowrank-expm {lowrank_expm.__version__}\n"


def test_module_and_script_are_one_program(files):
    by_module = start_program(*APPLY)
    assert (by_module.returncode, by_module.stdout, by_module.stderr) == (0, "", "")
    assert start_program("--help").stdout.startswith("usage: lowrank-expm ")
    assert start_program(*VERIFY, "missing.npy").returncode == 2


def test_help_loads_nothing_heavy(files):
    lines = "import sys; from lowrank_expm.cli import main\n"
    lines += "try: main(['--help'])\nfinally: print(sorted(sys.modules), file=sys.stderr)"
    result = subprocess.run(
        [sys.executable, "-c", lines], capture_output=True, text=True, timeout=SUBPROCESS_SECONDS
    )
    assert result.returncode == 0
    assert not {"'numba'", "'scipy'", "'rich'"} & set(re.findall(r"'\w+'", result.stderr))


def test_colour_settings_do_not_bring_a_bar_into_a_pipe(files):
    environment = os.environ | {"FORCE_COLOR": "1", "TTY_INTERACTIVE": "1", "TTY_COMPATIBLE": "1"}
    result = start_program(*APPLY, env=environment)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_encodings_that_lack_a_letter(files, encoding):
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    for words in [("--help",), VERIFY]:
        result = start_program(*words, env=environment)
        assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("words", [("--help",), VERIFY, (*VERIFY, "--json")])
def test_a_reader_that_leaves_early(files, words):
    reading, writing = os.pipe()
    os.close(reading)
    result = start_program(*words, stdout=writing)
    os.close(writing)
    assert (result.returncode, result.stderr) == (0, "")


def test_closed_standard_streams(files):
    words = " ".join(command(*VERIFY))
    for redirection, expected in [(">&-", 0), (">&- 2>&-", 0), ("missing.npy 2>&-", 2)]:
        result = subprocess.run(
            f"{words} {redirection}",
            shell=True,
            capture_output=True,
            text=True,
            timeout=SUBPROCESS_SECONDS,
        )
        assert (result.returncode, result.stdout, result.stderr) == (expected, "", "")


@linux_only
def test_output_to_a_full_device(files):
    with open("/dev/full", "w") as full:
        result = start_program(*VERIFY, stdout=full)
    assert_one_line_error((result.returncode, "", result.stderr), "No space left")


def in_a_terminal(*words):
    """Run with standard error in a terminal; give (exit status, standard output, terminal)."""
    leader, follower = os.openpty()
    environment = os.environ | {"TERM": "xterm"}
    with subprocess.Popen(
        command(*words), stdout=subprocess.PIPE, stderr=follower, env=environment
    ) as process:
        os.close(follower)
        shown = b""
        while True:
            try:
                part = os.read(leader, 65536)
            except OSError:  # Linux: the last follower has been closed
                break
            if not part:
                break
            shown += part
        out = process.stdout.read()
    os.close(leader)
    return process.returncode, out.decode(), shown.decode()


def test_apply_shows_a_bar_in_a_terminal(files):
    status, out, shown = in_a_terminal(*APPLY)
    assert (status, out) == (0, "")
    assert "100%" in shown
    assert names(files) == INPUTS | {"Y.npy"}


def test_verify_shows_a_spinner_in_a_terminal(files):
    status, out, shown = in_a_terminal(*VERIFY)
    assert status == 0
    assert "defect" in out
    assert "verifying" in shown


def test_the_bar_grows_when_a_route_takes_more_passes(monkeypatch, capsys):
    monkeypatch.setattr(cli, "_is_terminal", lambda stream: True)
    monkeypatch.setenv("TERM", "xterm")
    with cli._progress(10) as advance:
        for name in ["accumulate", "basis", "basis", "accumulate", "update"]:
            advance(name, 10)
    assert "100%" in capsys.readouterr().err
    with cli._progress(0) as advance:
        advance("update", 0)


@linux_only
def test_resident_memory_stays_below_the_files(files):
    """Files of 256 MB in total pass through a process that grows by far less."""
    few = peak_memory(*APPLY)
    n = 1_600_000
    for name in ("U", "V"):
        file = np.lib.format.open_memmap(f"{name}.npy", mode="w+", dtype=float, shape=(n, 8))
        file[:, 0] = n**-0.5
    np.save("B.npy", np.ones((n, 2)))
    assert peak_memory(*APPLY) - few < 96 * 2**20


def peak_memory(*words):
    """Give the peak resident memory in bytes of a run, its mapped files counted.

    The kernel's VmHWM, because a child's ru_maxrss starts at the size of its parent.
    """
    lines = "import sys; from pathlib import Path; from lowrank_expm.cli import main\n"
    lines += "status = main(sys.argv[1:]); print(Path('/proc/self/status').read_text())\n"
    lines += "sys.exit(status)"
    result = subprocess.run(
        [sys.executable, "-c", lines, *words],
        capture_output=True,
        text=True,
        timeout=SUBPROCESS_SECONDS,
    )
    assert (result.returncode, result.stderr) == (0, "")
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", result.stdout)[1])


def test_a_further_command_is_a_pair_of_functions(run, monkeypatch):
    def add(commands):
        cli._add_command(commands, "extra", lambda arguments: 7, "a test", "A test.")

    monkeypatch.setattr(cli, "_COMMANDS", (*cli._COMMANDS, add))
    assert run("extra") == (7, "", "")
