"""The command ``python -m lowrank_expm.experiments``."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DESCRIPTION = """\
Try the claims about Orthogonal Self-Attention (Zhang and Martens 2026, arXiv:2602.05996).

Each study prints a table and writes NAME.json and NAME.png. Three models are compared, with the
same shapes: "orthogonal" and "softmax" have neither skip connections nor normalisation and start
from the same orthogonal weights; "softmax, skip and norm" is the usual pre-norm transformer.

studies:
  orthogonality  ‖AᵀA − I‖ of every layer's attention matrices, before and after training
  cost           time and peak memory against the number of tokens, 128 to 65,536
  rank           effective rank of the tokens against depth, 1 to 64
  conditioning   condition number of the Jacobian against depth, 1 to 32
  training       test accuracy on handwritten digits against depth, 2 to 12
  alpha          what the first alpha and its learning rate trade: conditioning against learning
"""
EPILOG = """\
examples:
  python -m lowrank_expm.experiments --quick            every study, small: a few minutes
  python -m lowrank_expm.experiments rank conditioning  these two, in full
  python -m lowrank_expm.experiments training --mnist ~/mnist --epochs 5

Seeds are fixed: the same command on the same machine gives the same numbers, except for times.
"""


USING_IMAGES = {"training", "alpha"}


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    made = argparse.ArgumentParser(
        "python -m lowrank_expm.experiments",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("studies", nargs="*", metavar="STUDY", help="which ones; all by default")
    made.add_argument("--quick", action="store_true", help="smaller sizes, at most three epochs")
    made.add_argument("--seeds", type=_count, default=3, help="runs of each kind (default: 3)")
    made.add_argument("--out", type=Path, default=Path("experiments"), help="folder for results")
    made.add_argument("--threads", type=_count, help="threads to compute on (default: all)")
    made.add_argument(
        "--epochs", type=_count, default=20, help="passes over the images (default: 20)"
    )
    made.add_argument(
        "--mnist", type=Path, metavar="FOLDER", help="train on MNIST's four files in this folder"
    )
    return made


def _count(text: str) -> int:
    """A positive whole number."""
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the studies."""
    options = parser().parse_args(arguments)
    try:
        import matplotlib
        import sklearn
        import torch
    except ImportError as error:
        return _complain(
            f"{error.name} is missing; install it with: pip install torch scikit-learn matplotlib"
        )
    del matplotlib, sklearn
    from .. import _threads
    from .data import mnist
    from .studies import STUDIES

    names = options.studies or list(STUDIES)
    unknown = [name for name in names if name not in STUDIES]
    if unknown:
        return _complain(f"no study is called {unknown[0]}; there are {', '.join(STUDIES)}")
    if options.mnist and not {*names} & USING_IMAGES:
        return _complain(f"--mnist is for the studies {' and '.join(sorted(USING_IMAGES))} only")
    if options.threads:
        torch.set_num_threads(options.threads)
        _threads.set_threads(options.threads)
    with _threads._thread_pools().limit(limits=options.threads):
        try:
            _try_folder(options.out)
            if options.mnist:
                mnist(options.mnist)
            for name in names:
                _run(STUDIES[name], name, options)
        except OSError as error:
            return _complain(str(error))
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130
    return 0


def _try_folder(folder: Path) -> None:
    """Raise OSError before a study, not after it, where its results could not be written."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def _run(study: Any, name: str, options: argparse.Namespace) -> None:
    """One study, with what it does now beside a spinner."""
    from rich.console import Console

    from . import report
    from .studies import Plan
    from .training import Recipe

    with Console(stderr=True).status(name) as status:
        plan = Plan(
            options.quick,
            options.seeds,
            options.mnist,
            Recipe(epochs=options.epochs),
            lambda what: status.update(f"{name}: {what}"),
        )
        result = study(plan)
    where = ("studies", "out")
    settings = {key: str(value) for key, value in vars(options).items() if key not in where}
    report.show(result)
    report.save(result, options.out, settings)


def _complain(message: str) -> int:
    """Print an error; the exit status of a wrong call."""
    print(f"error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
