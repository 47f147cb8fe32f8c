"""The site's settings. One command builds it, without network and without warnings:

sphinx-build -W --keep-going docs docs/_build/html
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE), str(HERE.parent)]

import measured  # noqa: E402

from lowrank_expm import __version__  # noqa: E402

project = "lowrank_expm"
author = "The lowrank_expm developers"
copyright = author
version = release = __version__
language = "en"

extensions = [
    "mathml",
    "myst_nb",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.extlinks",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build", "_generated", "data"]
nitpicky = True
extlinks = {
    "doi": ("https://doi.org/%s", "doi:%s"),
    "arxiv": ("https://arxiv.org/abs/%s", "arXiv:%s"),
}

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

# Notebooks are stored without output and run here, once for each version of them. To build quickly
# without running them: LOWRANK_EXPM_DOCS_NOTEBOOKS=off
nb_execution_mode = os.environ.get("LOWRANK_EXPM_DOCS_NOTEBOOKS", "cache")
nb_execution_timeout = 600
nb_execution_raise_on_error = True
nb_output_stderr = "error"  # where warnings go
nb_merge_streams = True

# Without PyTorch its layers are documented all the same; the notebook that trains them is left out.
HAS_TORCH = find_spec("torch") is not None
autodoc_mock_imports = [] if HAS_TORCH else ["torch"]
exclude_patterns += [] if HAS_TORCH else ["notebooks/attention.ipynb"]

autodoc_default_options = {"members": True, "special-members": "__matmul__, __rmatmul__"}
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say it, with shapes
numpydoc_show_class_members = False

html_theme = "furo"
html_title = f"{project} {version}"
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False

# Tables, pictures and notebooks, before pages are read.
measured.write(HERE / "data", HERE / "_generated")
shutil.rmtree(HERE / "notebooks", ignore_errors=True)
shutil.copytree(HERE.parent / "notebooks", HERE / "notebooks")


def escape_bars(app: object, what: str, name: str, obj: object, options: object, lines: list[str]):
    """Docstrings write |t| for absolute values, never for a substitution."""
    lines[:] = [re.sub(r"(?<!\\)\|", r"\\|", line) for line in lines]


def trim_blocks(app: object, doctree: nodes.document) -> None:
    """Code blocks end with an empty line for doctest, not for readers."""
    for block in list(doctree.findall(nodes.literal_block)):
        if block.rawsource == block.astext():  # else it is highlighted already
            block.rawsource = block.rawsource.rstrip("\n")
            block[:] = [nodes.Text(block.rawsource)]


def setup(app: Sphinx) -> None:
    """Docstrings before numpydoc reads them, which it does at priority 500."""
    app.connect("autodoc-process-docstring", escape_bars, priority=400)
    app.connect("doctree-read", trim_blocks)
