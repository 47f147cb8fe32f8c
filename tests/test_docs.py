"""The README, the site's pages and the files of a release: what they say can be run and followed.

Doctest runs the Python blocks, and the build of the site checks its own cross-references; here
are the commands, the links of files that no build reads, and what must agree with the package.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

import lowrank_expm

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(
    path
    for path in [ROOT / "README.md", ROOT / "CHANGELOG.md", *DOCS.rglob("*.md")]
    if not {"_build", "_generated"} & set(path.relative_to(ROOT).parts)
)
FENCE = re.compile(r"^([ ]*)(`{3,})([^`\n]*)\n(.*?)^\1\2[ ]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!\!)\[[^\]]*\]\(([^)\s]+)\)")
DOI = re.compile(r"(?:doi\.org/|doi:|\{doi\}`)(10\.[^\s`)\]]*)")
ARXIV = re.compile(r"(?:arxiv\.org/abs/|arXiv:|\{arxiv\}`)([^\s`)\]]*)")


def text_of(path):
    return path.read_text(encoding="utf-8")


def name_of(path):
    return str(path.relative_to(ROOT))


def blocks(path):
    """The (language, content) of a page's fenced blocks."""
    return [(language.strip(), body) for _, _, language, body in FENCE.findall(text_of(path))]


def commands():
    """Every line of every bash block, with the page that it is on."""
    for path in PAGES:
        for language, body in blocks(path):
            if language == "bash":
                for line in body.splitlines():
                    for command in line.strip().split(" && "):
                        yield pytest.param(command, id=f"{name_of(path)}: {command}")


def anchors(path):
    """The anchors of a page's headings, as GitHub and MyST make them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text_of(path)), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    }


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_blocks_are_of_kinds_that_something_runs(path):
    for language, body in blocks(path):
        if language == "python":
            assert body.lstrip().startswith(">>> "), "doctest does not see this block"
            assert body.rstrip("\n").splitlines()[-1].startswith((">>> ", "... ")) or body.endswith(
                "\n\n"
            ), "doctest takes the fence for output: end the block with an empty line"
        else:
            assert language in {"bash", "text"} or language.startswith("{"), language


@pytest.fixture
def in_folder_of_arrays(tmp_path, monkeypatch):
    """A folder with the files that the commands name."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for name, shape in {"U": (200, 2), "V": (200, 2), "B": (200, 3)}.items():
        np.save(f"{name}.npy", rng.standard_normal(shape) / 10)


@pytest.mark.parametrize("command", list(commands()))
def test_commands_run(command, in_folder_of_arrays, monkeypatch):
    words = shlex.split(command)
    if words[:4] == ["python", "-m", "pip", "install"]:
        return extras_exist(words)
    if command in text_of(ROOT / ".ci/run") or (ROOT / words[0]).is_file():
        return None
    if words[0] == "sphinx-build":
        assert "sphinx-build -W --keep-going" in text_of(ROOT / ".ci/run")
        return None
    if words[:2] == ["lowrank-expm", "bench"] or words == ["python", "-m", "pytest"]:
        return runs(
            [*words[:2], "--help"] if words[0] == "lowrank-expm" else ["python", "--version"]
        )
    if words[2:3] == ["lowrank_expm.experiments"]:  # minutes, and torch
        return runs([*words[:3], "--help"])
    if words[2:3] and words[2].startswith("tests."):
        monkeypatch.chdir(ROOT)
        words += ["--cases", "4"]
    return runs(words)


def extras_exist(words):
    extras = tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]["optional-dependencies"]
    for name in re.findall(r"\[(\w+)\]", " ".join(words)):
        assert name in extras


def runs(words):
    program = {"python": [sys.executable], "lowrank-expm": [sys.executable, "-m", "lowrank_expm"]}
    done = subprocess.run(
        [*program[words[0]], *words[1:]], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_relative_links_lead_somewhere(path):
    for target in LINK.findall(FENCE.sub("", text_of(path))):
        if "://" in target or target.startswith("mailto:"):
            continue
        file, _, anchor = target.partition("#")
        page = (path.parent / file).resolve() if file else path
        assert page.exists(), target
        if anchor:
            assert anchor in anchors(page), target


@pytest.mark.parametrize(
    "path", [*PAGES, *sorted((ROOT / "lowrank_expm").rglob("*.py"))], ids=name_of
)
def test_identifiers_of_papers_have_the_right_form(path):
    for doi in DOI.findall(text_of(path)):
        assert re.fullmatch(r"10\.\d{4,5}/[\w.()/:-]+?[.,;]?", doi), doi
    for number in ARXIV.findall(text_of(path)):
        assert re.fullmatch(r"\d{4}\.\d{4,5}[.,;]?|%s", number), number


def test_formulas_have_braces_where_the_site_needs_them():
    """The reader of formulas takes the 12 of \\frac12 for one number."""
    for path in PAGES:
        assert not re.search(r"\\[dt]?frac *[^{ ]|\\sqrt *[0-9]{2}", text_of(path)), name_of(path)


def test_every_paper_that_the_code_cites_is_in_the_bibliography():
    page = text_of(DOCS / "bibliography.md")
    for path in sorted((ROOT / "lowrank_expm").rglob("*.py")):
        for identifier in DOI.findall(text_of(path)) + ARXIV.findall(text_of(path)):
            assert f"`{identifier.rstrip('.,;')}`" in page, f"{name_of(path)} cites {identifier}"


def test_every_public_name_is_on_a_page_of_the_reference():
    pages = "\n".join(map(text_of, (DOCS / "api").glob("*.md")))
    for name in lowrank_expm.__all__:
        whole = f"{lowrank_expm.__name__}.{name}"
        if name.startswith("_"):
            continue
        found = re.search(rf"auto(function|class|module):: {re.escape(whole)}$", pages, re.M)
        assert found, f"{whole} is on no page of docs/api"


def test_pictures_have_a_text_for_those_who_do_not_see_them():
    for path in PAGES:
        for opening in re.findall(r"^:::\{figure\}.*?(?=^:::$)", text_of(path), re.M | re.S):
            assert re.search(r"^:alt: \S.{30,}$", opening, re.M), f"{name_of(path)}: {opening}"


def test_the_version_is_the_same_everywhere():
    version = lowrank_expm.__version__
    assert f"version: {version}\n" in text_of(ROOT / "CITATION.cff")
    released = re.findall(r"^## \[(\d[^\]]*)\]", text_of(ROOT / "CHANGELOG.md"), re.MULTILINE)
    assert not released or released[0] == version


def test_the_changelog_keeps_its_form():
    headings = re.findall(r"^##? .*$|^### .*$", text_of(ROOT / "CHANGELOG.md"), re.MULTILINE)
    assert headings[:2] == ["# Changelog", "## [Unreleased]"]
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    for heading in headings[2:]:
        if heading.startswith("### "):
            assert heading[4:] in kinds
        else:
            assert re.fullmatch(r"## \[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", heading)


def test_the_citation_has_the_fields_it_must_have():
    fields = dict(re.findall(r"^([\w-]+): ?(.*)$", text_of(ROOT / "CITATION.cff"), re.MULTILINE))
    assert fields["cff-version"] == "1.2.0"
    assert {"message", "title", "authors", "version", "license"} <= set(fields)
    assert fields["license"] == "BSD-3-Clause"


def test_the_map_of_the_modules_names_every_module():
    page = text_of(DOCS / "contributing" / "modules.md")
    package = ROOT / "lowrank_expm"
    for path in sorted(package.rglob("*.py")):
        relative = str(path.relative_to(package))
        if relative not in {"__init__.py", "_version.py", "passes/__init__.py"}:
            assert f"`{relative}`" in page, f"{relative} is not on the map of the modules"


def test_public_modules_can_be_found_from_their_pages():
    """Found, not imported: some need a library that is optional."""
    for page in (DOCS / "api").glob("*.md"):
        for module in re.findall(r"automodule:: (\S+)", text_of(page)):
            assert importlib.util.find_spec(module), module
