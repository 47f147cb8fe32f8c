"""The command line: ``lowrank-expm demo | apply | verify | bench``.

Each command is one function ``_run_*`` that returns the exit status and one function ``_add_*``
that describes it to argparse; a further command is such a pair and its entry in ``_COMMANDS``.
NumPy, SciPy, numba and rich are imported where they are used, so that ``--help`` is immediate.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import json
import math
import os
import secrets
import shutil
import signal
import stat
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, TypeAlias

from lowrank_expm._version import __version__

if TYPE_CHECKING:
    import numpy as np
    from _typeshed import SupportsWrite
    from numpy.typing import NDArray

    from lowrank_expm.bench import Results
    from lowrank_expm.skew import Method
    from lowrank_expm.verify import Report

    Array = NDArray[Any]
    Commands: TypeAlias = "argparse._SubParsersAction[_Parser]"

__all__ = ["main"]

_PROGRAM = "lowrank-expm"
_METHODS = ("auto", "gram", "qr", "direct")
_NPY_MAGIC = b"\x93NUMPY"
_ZIP_MAGIC = b"PK"

_FAILED, _WRONG_USE = 1, 2  # exit statuses; a run stopped by signal s has status 128 + s


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv : sequence of str, optional
        The words after the program's name; by default those of this process.

    Returns
    -------
    int
        The exit status: 0 for success, 1 where a verification did not pass, 2 where the command
        or one of its files is wrong (one line on standard error says what), 128 + s where
        signal s stopped it.

    Raises
    ------
    SystemExit
        With status 0, after ``--help`` and ``--version``.

    Examples
    --------
    >>> from lowrank_expm.cli import main
    >>> main(["verify", "missing.npy", "missing.npy"])
    2
    """
    words = sys.argv[1:] if argv is None else argv
    try:
        arguments = _parser().parse_args(_join_time(words))
        status: int = arguments.run(arguments)
        return status
    except _Stopped as stop:
        return _complain(f"stopped by {stop.signal.name}", 128 + stop.signal)
    except KeyboardInterrupt:
        return _complain("interrupted", 128 + signal.SIGINT)
    except (_UsageError, ValueError, TypeError, OSError, MemoryError) as error:
        return _complain(_explain(error), _WRONG_USE)
    finally:
        _flush_output()


# ---------------------------------------------------------------------------------- commands


def _run_demo(arguments: argparse.Namespace) -> int:
    """Apply, verify and compare with SciPy on a generated problem."""
    import numpy as np

    from lowrank_expm import skew_expm_multiply
    from lowrank_expm.verify import check

    n, r, seed = arguments.n, arguments.r, arguments.seed
    with _spinner("generating U, V and b"):
        U, V, b = _demo_problem(n, r, seed)
    _say(f"exp(U Vᵀ - V Uᵀ) b, n = {n:,}, r = {r}, float64, random with seed {seed}\n")
    with _spinner("applying"):
        ours, y = _best_time(lambda rows: skew_expm_multiply(U[:rows], V[:rows], b[:rows]), n)
    with _spinner("verifying"):
        report = check(U, V, b)
    with _spinner("applying with scipy.sparse.linalg.expm_multiply"):
        theirs, y_scipy = _best_time(
            lambda rows: _scipy_expm_multiply(U[:rows], V[:rows], b[:rows]), n, calls=1
        )

    difference = float(np.linalg.norm(y - y_scipy) / np.linalg.norm(y_scipy))
    allowed = 1e3 * np.finfo(np.float64).eps / 2 * max(1.0, float(report.angle))
    verified = bool(report.passed) and difference <= allowed
    _say(f"{report}\n")
    _say(_demo_times(ours, theirs))
    _say(f"The two answers differ by {difference:.1e} (relative; {allowed:.1e} is allowed).")
    _say("verified" if verified else "NOT VERIFIED")
    return 0 if verified else _FAILED


def _run_apply(arguments: argparse.Namespace) -> int:
    """Write exp(t(U Vᴴ - V Uᴴ)) B to a file, block by block."""
    U, V, B = (_open(path) for path in (arguments.U, arguments.V, arguments.B))
    with _signals_raise(), _replacing(arguments.output) as temporary:
        _apply_to_file(temporary, U, V, B, arguments.t, arguments.method)
    if not arguments.verify:
        return 0
    return _report(_check(U, V, B, arguments), as_json=False)


def _run_verify(arguments: argparse.Namespace) -> int:
    """Print the verification report of the operator given by files."""
    U, V = _open(arguments.U), _open(arguments.V)
    B = None if arguments.B is None else _open(arguments.B)
    return _report(_check(U, V, B, arguments), as_json=arguments.json)


def _run_bench(arguments: argparse.Namespace) -> int:
    """Measure speed beside the peers and the machine's limits."""
    from lowrank_expm import bench
    from lowrank_expm._machine import require_matplotlib

    if arguments.plot is not None:
        require_matplotlib()
        _require_writable(arguments.plot)
    plan = bench.Plan.quick() if arguments.quick else bench.Plan.full()
    if arguments.repeats is not None:
        plan = dataclasses.replace(plan, repeats=arguments.repeats)
    with _steps() as progress:
        results = bench.run(plan, progress)
    _print_results(results, as_json=arguments.json)
    if arguments.plot is not None:
        with _signals_raise(), _replacing(arguments.plot) as temporary:
            bench.plot(results, temporary, _picture_format(arguments.plot))
    return 0 if results.agrees else _FAILED


# ------------------------------------------------------------------------------ the work inside


def _apply_to_file(path: str, U: Array, V: Array, B: Array, t: float, method: Method) -> None:
    """Stream the result into a new .npy file at `path`."""
    from lowrank_expm import skew_expm_multiply
    from lowrank_expm._inputs import floating
    from lowrank_expm.passes import watching

    out = _create(path, _result_shape(U, V, B), floating(U.dtype, V.dtype, B.dtype))
    rows = math.prod(out.shape if B.ndim == 1 else out.shape[:-1])
    with _progress(rows) as advance, watching(advance):
        skew_expm_multiply(U, V, B, t, method=method, out=out)
    out.flush()


def _check(U: Array, V: Array, B: Array | None, arguments: argparse.Namespace) -> Report:
    """Verify, behind a spinner."""
    from lowrank_expm.verify import check

    with _spinner("verifying"):
        derivatives = getattr(arguments, "derivatives", False)
        return check(U, V, B, arguments.t, method=arguments.method, derivatives=derivatives)


def _report(report: Report, *, as_json: bool) -> int:
    """Print a report and give the exit status that belongs to it."""
    if as_json:
        _say(json.dumps(_json_value(report.to_dict()), indent=2, allow_nan=False))
    else:
        _say(str(report))
    return 0 if report.passed else _FAILED


def _json_value(value: Any) -> Any:
    """Turn a value into what JSON can hold: arrays into lists, NaN and infinity into null."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): _json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _demo_problem(n: int, r: int, seed: int) -> tuple[Array, Array, Array]:
    """Draw U and V with columns of length about √3, so the angles are about 3, and b."""
    import numpy as np

    generator = np.random.default_rng(seed)
    U = generator.standard_normal((n, r))
    V = generator.standard_normal((n, r))
    U *= math.sqrt(3 / n)
    V *= math.sqrt(3 / n)
    return U, V, generator.standard_normal(n)


def _scipy_expm_multiply(U: Array, V: Array, b: Array) -> Array:
    """Apply the same exponential with SciPy, through the low-rank form as a LinearOperator."""
    from lowrank_expm._peers import scipy_expm_multiply

    return scipy_expm_multiply(U, V, b)


def _best_time(call: Callable[[int], Array], n: int, calls: int = 3) -> tuple[float, Array]:
    """Time call(n), the best of some calls after a warm-up on fewer rows."""
    call(min(n, 10_000))
    seconds = math.inf
    for _ in range(calls):
        start = time.perf_counter()
        result = call(n)
        seconds = min(seconds, time.perf_counter() - start)
    return seconds, result


def _demo_times(ours: float, theirs: float) -> str:
    """Set the two times side by side."""
    return (
        f"{'lowrank_expm.skew_expm_multiply':<36}{ours:>10.4f} s\n"
        f"{'scipy.sparse.linalg.expm_multiply':<36}{theirs:>10.4f} s"
        f"   ({theirs / ours:.1f} times as long)\n"
        "Best of 3 calls (SciPy: 1), after a warm-up call: compilation is not counted."
    )


def _print_results(results: Results, *, as_json: bool) -> None:
    """Print a benchmark as JSON, as rich tables in a terminal, as plain text in a pipe."""
    if as_json:
        _say(json.dumps(_json_value(results.to_dict()), indent=2, allow_nan=False))
        return
    from lowrank_expm._tables import plain_text, print_rich

    if _is_terminal(sys.stdout):
        print_rich(results, sys.stdout)
    else:
        _say(plain_text(results))


# ------------------------------------------------------------------------------- files in, out


def _open(path: str) -> Array:
    """Map an .npy file into memory; nothing in it is ever unpickled."""
    import numpy as np

    _require_npy(path)
    advice = "write it again with numpy.save from an array of real or complex numbers"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about headers written by Python 2
            array = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # whatever a damaged header makes NumPy raise
        raise _UsageError(f"{path}: cannot be mapped ({error}); {advice}") from error
    if array.dtype.kind not in "biufc":
        raise _UsageError(f"{path}: holds {array.dtype}; {advice}")
    return array


def _require_npy(path: str) -> None:
    """Refuse what is no .npy file before NumPy sees it."""
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise _UsageError(f"{path}: is a directory; give an .npy file")
    if not stat.S_ISREG(mode):
        raise _UsageError(f"{path}: is not a regular file, so it cannot be memory-mapped")
    with open(path, "rb") as file:
        start = file.read(len(_NPY_MAGIC))
    if start.startswith(_ZIP_MAGIC):
        raise _UsageError(f"{path}: is an .npz archive; save each array as .npy with numpy.save")
    if start != _NPY_MAGIC:
        raise _UsageError(f"{path}: is not an .npy file; write one with numpy.save")


def _create(path: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.memmap[Any, Any]:
    """Create an .npy file and map it, its disk space reserved."""
    import numpy as np

    out = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
    _reserve(path)
    return out


def _reserve(path: str) -> None:
    """Have a full disk show now, as an error: a write to the map would be killed by SIGBUS."""
    if not hasattr(os, "posix_fallocate"):
        return
    with open(path, "r+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise


@contextlib.contextmanager
def _replacing(target: str) -> Iterator[str]:
    """Give a temporary name beside `target` that is renamed to it on success, removed if not."""
    _require_writable(target)
    path = os.path.realpath(target)
    temporary = os.path.join(os.path.dirname(path), f".{_PROGRAM}-{secrets.token_hex(8)}.tmp")
    try:
        yield temporary
        if os.path.exists(path):
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    except OSError as error:
        raise _UsageError(f"{target}: cannot be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def _require_writable(target: str) -> None:
    """Refuse an output that a rename cannot or should not replace."""
    directory = os.path.dirname(os.path.realpath(target))
    if os.path.isdir(target) or not os.path.basename(target):
        raise _UsageError(f"{target}: is a directory; give the name of the file to write")
    if os.path.exists(target) and not os.path.isfile(target):
        raise _UsageError(f"{target}: is a pipe or a device; the output must be a regular file")
    if not os.path.isdir(directory):
        raise _UsageError(f"{target}: there is no directory {directory}; make it first")
    if os.path.exists(target) and not os.access(target, os.W_OK):
        raise _UsageError(f"{target}: is write-protected; choose another name")


def _result_shape(U: Array, V: Array, B: Array) -> tuple[int, ...]:
    """Give the broadcast batch shape followed by B's trailing shape."""
    from lowrank_expm._inputs import batch

    trailing = B.shape if B.ndim == 1 else B.shape[-2:]
    return batch(f"U {U.shape}, V {V.shape} and B {B.shape}", U, V, B) + trailing


# ------------------------------------------------------------------------- terminal and signals


class _UsageError(Exception):
    """What the user asked for cannot be done; the message is the whole story."""


class _Stopped(BaseException):
    """A signal asked the process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack, as Ctrl-C does, so that clean-up runs."""
    previous: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in {signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}:
            if signal.getsignal(number) is signal.SIG_DFL:
                previous[number] = signal.signal(number, _stop)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _stop(number: int, _frame: object) -> NoReturn:
    """Handle a signal by raising it as an exception."""
    raise _Stopped(number)


@contextlib.contextmanager
def _progress(rows: int) -> Iterator[Callable[[str, int], None]]:
    """Show a bar over two passes of `rows` rows; it grows when a route needs more of them."""
    if not _is_terminal(sys.stderr):
        yield lambda name, done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<10}"), BarColumn(), TaskProgressColumn())
    total, completed = 2 * rows, 0
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("starting", total=total)

        def advance(name: str, done: int) -> None:
            nonlocal total, completed
            completed += done
            while completed > total:
                total += max(rows, 1)
            progress.update(task, description=name, completed=completed, total=total)

        yield advance
        progress.update(task, description="done", completed=total, total=total)


@contextlib.contextmanager
def _steps() -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar over steps of which each is named, in a terminal only."""
    if not _is_terminal(sys.stderr):
        yield lambda name, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("starting", total=None)
        yield lambda name, done, total: progress.update(
            task, description=name, completed=done, total=total
        )


@contextlib.contextmanager
def _spinner(text: str) -> Iterator[None]:
    """Show that something goes on, in a terminal only."""
    if not _is_terminal(sys.stderr):
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


def _is_terminal(stream: TextIO | None) -> bool:
    """Tell a terminal from a pipe, a file and a closed stream."""
    return stream is not None and stream.isatty()


def _say(text: str) -> None:
    """Print on standard output; a reader that has left, as `head` does, is no error."""
    if sys.stdout is None:
        return
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "replace").decode(encoding), flush=True)
    except BrokenPipeError:
        _discard_output()


def _flush_output() -> None:
    """Flush standard output while an error can still be handled."""
    if sys.stdout is not None:
        try:
            sys.stdout.flush()
        except OSError:
            _discard_output()


def _discard_output() -> None:
    """Send standard output nowhere, so that the flush at exit does not fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _complain(message: str, status: int) -> int:
    """Write one line on standard error and give the exit status."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(f"{_PROGRAM}: error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return status


def _explain(error: BaseException) -> str:
    """Say what an exception says, without Python's decoration."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, MemoryError):
        return f"not enough memory: {error}" if str(error) else "not enough memory"
    return str(error)


# ------------------------------------------------------------------------------ what is accepted


class _Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are one line, like all others of this program."""

    def error(self, message: str) -> NoReturn:
        """Raise what `main` reports."""
        raise _UsageError(f"{message} (see {self.prog} --help)")

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        """Print the help, also where the output's encoding lacks a letter of it."""
        if file is None:
            _say(self.format_help().rstrip())
        else:
            super().print_help(file)


def _parser() -> argparse.ArgumentParser:
    """Build the parser of all commands."""
    parser = _Parser(
        prog=_PROGRAM,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        description="Apply exp(t(U Vᴴ - V Uᴴ)), an orthogonal (unitary) operator given by two\n"
        "tall arrays U and V of shape (n, r), at a cost linear in n, and verify it.",
        epilog="Start with:\n"
        f"  {_PROGRAM} demo                 see it work on a million rows\n"
        f"  {_PROGRAM} apply --help         apply it to arrays in .npy files\n"
        f"  {_PROGRAM} verify --help        measure orthogonality and conditioning\n"
        f"  {_PROGRAM} bench --quick        time it beside SciPy and the machine's limits\n\n"
        "Exit status: 0 success, 1 a verification did not pass, 2 wrong command or file.",
    )
    parser.add_argument("--version", action="version", version=f"{_PROGRAM} {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    for add in _COMMANDS:
        add(commands)
    return parser


def _add_command(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], int], help: str, text: str
) -> argparse.ArgumentParser:
    """Add a command with its one-line help, its longer text, and the function that runs it."""
    parser = commands.add_parser(
        name,
        help=help,
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    return parser


def _add_demo(commands: Commands) -> None:
    """Describe `demo`."""
    parser = _add_command(
        commands,
        "demo",
        _run_demo,
        "apply and verify on a generated problem, beside SciPy",
        "Apply exp(U Vᵀ - V Uᵀ) to a vector, verify the result, and time it beside\n"
        "scipy.sparse.linalg.expm_multiply on the same problem. Needs no files.\n"
        "Exit status 0 only if verified.\n\n"
        "Examples:\n"
        f"  {_PROGRAM} demo\n"
        f"  {_PROGRAM} demo --n 100000 --r 32",
    )
    parser.add_argument("--n", type=_count, default=1_000_000, help="rows (default 1,000,000)")
    parser.add_argument("--r", type=_count, default=8, help="columns of U and V (default 8)")
    parser.add_argument("--seed", type=int, default=0, help="of the generator (default 0)")


def _add_apply(commands: Commands) -> None:
    """Describe `apply`."""
    parser = _add_command(
        commands,
        "apply",
        _run_apply,
        "write exp(t(U Vᴴ - V Uᴴ)) B to a file",
        "Read U and V (n, r) and B (n,) or (n, k), further axes in front being batches, and\n"
        "write exp(t(U Vᴴ - V Uᴴ)) B. All files are memory-mapped and pass through block by\n"
        "block, so they may be far larger than memory. The output appears under its name\n"
        "when it is complete, replacing a file of that name, which may be an input.\n\n"
        "Examples:\n"
        f"  {_PROGRAM} apply U.npy V.npy B.npy -o Y.npy\n"
        f"  {_PROGRAM} apply U.npy V.npy B.npy -o Y.npy -t -0.5 --verify\n"
        f"  {_PROGRAM} apply U.npy V.npy B.npy -o B.npy        replaces B by the result",
    )
    _add_factors(parser)
    parser.add_argument("B", metavar="B.npy", help="what the operator is applied to")
    parser.add_argument("-o", "--output", metavar="Y.npy", required=True, help="the result's file")
    _add_options(parser)
    parser.add_argument(
        "--verify", action="store_true", help="print the report too; exit status 1 if not passed"
    )


def _add_verify(commands: Commands) -> None:
    """Describe `verify`."""
    parser = _add_command(
        commands,
        "verify",
        _run_verify,
        "report orthogonality and conditioning",
        "Measure how far exp(t(U Vᴴ - V Uᴴ)), as computed, is from orthogonal (unitary), its\n"
        "certified bound, and the conditioning of the problem. With B, the norms and the\n"
        "inverse are tried on B. Exit status 1 if the report does not pass.\n\n"
        "Examples:\n"
        f"  {_PROGRAM} verify U.npy V.npy\n"
        f"  {_PROGRAM} verify U.npy V.npy B.npy -t 10 --method qr\n"
        f"  {_PROGRAM} verify U.npy V.npy --derivatives\n"
        f"  {_PROGRAM} verify U.npy V.npy --json | python -m json.tool",
    )
    _add_factors(parser)
    parser.add_argument("B", metavar="B.npy", nargs="?", help="arrays to try the operator on")
    _add_options(parser)
    parser.add_argument(
        "--derivatives", action="store_true", help="try the derivatives too, in memory"
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON; what is not finite becomes null"
    )


def _add_bench(commands: Commands) -> None:
    """Describe `bench`."""
    parser = _add_command(
        commands,
        "bench",
        _run_bench,
        "measure speed, beside SciPy and the machine's limits",
        "Time the library, other ways to compute the same, and how fast this machine streams\n"
        "memory and multiplies matrices, in turns in one process; check every answer; and set\n"
        "the ratios beside their targets. Takes some minutes and up to 4 GB of memory; other\n"
        "programs that run meanwhile disturb it.\n"
        "Exit status 1 if an answer differs; a missed target is reported but is no failure.\n\n"
        "Examples:\n"
        f"  {_PROGRAM} bench --quick\n"
        f"  {_PROGRAM} bench --plot speed.png\n"
        f"  {_PROGRAM} bench --json > speed.json",
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes, less than a minute")
    parser.add_argument(
        "--repeats",
        type=_count,
        metavar="N",
        help="samples of each contender, fewer where one is slow (default 9; 5 with --quick)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--plot",
        type=_picture,
        metavar="FILE.png",
        help="draw time against n, as .png, .pdf or .svg; needs matplotlib",
    )


_COMMANDS = (_add_demo, _add_apply, _add_verify, _add_bench)


def _add_factors(parser: argparse.ArgumentParser) -> None:
    """Add the two positional arguments that every command on files starts with."""
    parser.add_argument("U", metavar="U.npy", help="the factor U, shape (..., n, r)")
    parser.add_argument("V", metavar="V.npy", help="the factor V, of the same last two axes")


def _add_options(parser: argparse.ArgumentParser) -> None:
    """Add -t and --method."""
    parser.add_argument(
        "-t",
        "--time",
        dest="t",
        metavar="T",
        type=_finite,
        default=1.0,
        help="a real number; -T gives the inverse of T (default 1)",
    )
    parser.add_argument(
        "--method",
        choices=_METHODS,
        default="auto",
        help="gram: two passes; qr: orthonormal basis first, slower; direct: dense, for few rows; "
        "auto (default): gram or direct, and qr where the certificate asks for it",
    )


def _finite(text: str) -> float:
    """Read a finite real number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite real number")
    return value


def _count(text: str) -> int:
    """Read a whole number of at least one; 1e6 will do."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value.is_integer() and value >= 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(value)


def _picture(text: str) -> str:
    """Read the name of a picture."""
    if _picture_format(text) not in ("png", "pdf", "svg"):
        raise argparse.ArgumentTypeError(f"{text!r} does not end in .png, .pdf or .svg")
    return text


def _picture_format(path: str) -> str:
    """The ending of a file name."""
    return os.path.splitext(path)[1].lower().removeprefix(".")


def _join_time(words: Sequence[str]) -> list[str]:
    """Write `-t -1e3` as `-t=-1e3`: alone, argparse takes the number for an option."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] in ("-t", "--time") and word.startswith("-"):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined
