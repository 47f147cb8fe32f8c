"""Run the notebooks, each in its own kernel; or strip what running them left behind.

    python notebooks/run.py              # every notebook: its time, and an exit status
    python notebooks/run.py scale.ipynb  # one of them
    python notebooks/run.py --strip      # remove outputs and everything else that a run adds

An error fails a notebook, and so does anything on its standard error, where warnings go. So does
a notebook that is not stripped: outputs belong to the site, not to the repository.
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
KEPT = {"mystnb", "tags"}  # what a cell's metadata may hold: alt texts, and tags for the site
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def strip(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook as it is stored: no outputs, no counts, no trace of the machine."""
    notebook = nbformat.from_dict(notebook | {"metadata": METADATA})
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02}"
        cell.metadata = {key: cell.metadata[key] for key in sorted(KEPT & cell.metadata.keys())}
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return notebook


def text(notebook: nbformat.NotebookNode) -> str:
    """A notebook as a file holds it."""
    return nbformat.writes(notebook) + "\n"


def complaints(notebook: nbformat.NotebookNode) -> list[str]:
    """What a run wrote on standard error."""
    outputs = (o for cell in notebook.cells for o in cell.get("outputs", ()))
    return [o.text for o in outputs if o.output_type == "stream" and o.name == "stderr"]


def run(path: Path) -> list[str]:
    """Run one notebook; what is wrong with it."""
    notebook = nbformat.read(path, as_version=4)
    problems = []
    if text(strip(notebook)) != path.read_text(encoding="utf-8"):
        problems.append("not stripped: python notebooks/run.py --strip")
    client = NotebookClient(notebook, timeout=LIMIT, resources={"metadata": {"path": HERE}})
    try:
        client.execute()
    except CellExecutionError as error:
        problems.append(str(error))
    return problems + complaints(notebook)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run or strip the notebooks.")
    parser.add_argument("names", nargs="*", help="files in this directory; all by default")
    parser.add_argument("--strip", action="store_true", help="strip instead of running")
    arguments = parser.parse_args()
    paths = [HERE / Path(n).name for n in arguments.names] or sorted(HERE.glob("*.ipynb"))
    failed = False
    for path in paths:
        if arguments.strip:
            notebook = nbformat.read(path, as_version=4)
            path.write_text(text(strip(notebook)), encoding="utf-8")
            continue
        start = time.perf_counter()
        problems = run(path)
        failed |= bool(problems)
        print(f"{path.name:45s} {time.perf_counter() - start:6.1f} s", *problems, sep="\n  ")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
