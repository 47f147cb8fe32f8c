"""Run the notebooks, each in its own kernel; strip what a run left; check that.

    python notebooks/run.py              # all of them, with their times
    python notebooks/run.py scale.ipynb  # one of them
    python notebooks/run.py --strip      # remove outputs and what else a run adds
    python notebooks/run.py --check      # run nothing; fail on stored outputs

An error fails a notebook, and so does anything on its standard error, where
warnings go. Outputs belong to the site, whose build runs the notebooks too.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

HERE = Path(__file__).parent
LIMIT = 300  # seconds for one cell
KEPT = {"mystnb", "tags"}  # of a cell's metadata: alt texts, and tags for the site
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
METADATA = {"kernelspec": KERNEL, "language_info": {"name": "python"}}


def strip(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook as it is stored: no outputs, no trace of the machine."""
    notebook = nbformat.from_dict(notebook | {"metadata": METADATA})
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02}"
        kept = sorted(KEPT & cell.metadata.keys())
        cell.metadata = {key: cell.metadata[key] for key in kept}
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return notebook


def text(notebook: nbformat.NotebookNode) -> str:
    """A notebook as a file holds it."""
    return nbformat.writes(notebook) + "\n"


def complaints(notebook: nbformat.NotebookNode) -> list[str]:
    """What a run wrote on standard error."""
    outputs = (o for cell in notebook.cells for o in cell.get("outputs", ()))
    return [
        o.text for o in outputs if o.output_type == "stream" and o.name == "stderr"
    ]


def run(path: Path) -> list[str]:
    """Run one notebook; what is wrong with it."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=LIMIT, resources={"metadata": {"path": HERE}}
    )
    start, problems = time.perf_counter(), []
    try:
        client.execute()
    except CellExecutionError as error:
        problems.append(str(error))
    print(f"{path.name:45s} {time.perf_counter() - start:6.1f} s")
    return problems + complaints(notebook)


def check(path: Path) -> list[str]:
    """What is wrong with a notebook as it is stored."""
    stored = path.read_text(encoding="utf-8")
    same = stored == text(strip(nbformat.reads(stored, as_version=4)))
    return (
        []
        if same
        else [f"{path.name} is not stripped: python notebooks/run.py --strip"]
    )


def write_stripped(path: Path) -> list[str]:
    """Store a notebook without what a run added."""
    stripped = strip(nbformat.read(path, as_version=4))
    path.write_text(text(stripped), encoding="utf-8")
    return []


def main() -> int:
    parser = argparse.ArgumentParser(description="Run, strip or check notebooks.")
    parser.add_argument("names", nargs="*", help="files; all by default")
    parser.add_argument("--strip", action="store_true", help="remove outputs")
    parser.add_argument(
        "--check", action="store_true", help="fail on stored outputs"
    )
    arguments = parser.parse_args()
    work = write_stripped if arguments.strip else check if arguments.check else run
    names = arguments.names or sorted(path.name for path in HERE.glob("*.ipynb"))
    problems = [
        problem for name in names for problem in work(HERE / Path(name).name)
    ]
    print(*problems, sep="\n", end="\n" if problems else "")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
