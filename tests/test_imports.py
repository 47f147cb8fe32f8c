"""Who may import whom, read from the source; and what importing the package loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lowrank_expm

PACKAGE = Path(lowrank_expm.__file__).parent
NAME = PACKAGE.name
FILES = sorted(PACKAGE.rglob("*.py"))
SHARED = {"_array", "_numba", "_threads"}
HEAVY = ("numba", "scipy", "torch", "cupy", "jax", "dask", "rich", "mpmath", "array_api_compat")


def module_of(path):
    """A file's dotted name inside the package, "" for the package itself."""
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path):
    """(inside, outside): modules of this package, and others, that a file imports anywhere."""
    here = [*module_of(path).split("."), "x"] if path.name == "__init__.py" else None
    here = here if here is not None else module_of(path).split(".")
    here = [part for part in here if part]
    inside, outside = set(), set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module]
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level]
            module = ".".join([*base, *(node.module.split(".") if node.module else [])])
            targets = [f"{module}.{alias.name}".strip(".") for alias in node.names]
            inside.update(t if exists(t) else module for t in targets)
            continue
        else:
            continue
        for name in names:
            top, _, rest = name.partition(".")
            if top == NAME:
                inside.add(rest)
            else:
                outside.add(top)
    return inside, outside


def exists(module):
    """Whether a dotted name inside the package is a module."""
    path = PACKAGE.joinpath(*module.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def ids(path):
    return module_of(path) or NAME


def room(name):
    """The files of a part of the package."""
    return sorted((PACKAGE / name).rglob("*.py"))


def test_the_parser_of_these_tests_sees_imports():
    """Relative ones, those inside functions, and submodules imported by name."""
    inside, outside = imports_of(PACKAGE / "core" / "exponential.py")
    assert {"_array", "core.taylor", "core.selection", "core.certificate"} <= inside
    assert {"__future__", "typing"} <= outside
    assert "core.compiled" in imports_of(PACKAGE / "core" / "__init__.py")[0]
    assert "numba" in imports_of(PACKAGE / "_numba.py")[1]
    assert "verify" in imports_of(PACKAGE / "__init__.py")[0]


@pytest.mark.parametrize("name", ["core", "passes"])
def test_core_and_passes_know_nothing_above_or_beside_them(name):
    """core/ knows m, passes/ knows n, neither knows the other."""
    assert room(name)
    for path in room(name):
        inside, _ = imports_of(path)
        foreign = {m for m in inside if m.partition(".")[0] not in {name, *SHARED}}
        assert not foreign, f"{ids(path)} imports {sorted(foreign)}"


@pytest.mark.parametrize(
    "module", ["_array", "_numba", "_threads", "_exact", "_inputs", "_version"]
)
def test_the_lowest_modules_import_nothing_of_the_package(module):
    inside, _ = imports_of(PACKAGE / f"{module}.py")
    assert not inside


def test_no_module_imports_the_package_itself():
    """`import lowrank_expm` inside it would be a step upwards."""
    for path in FILES:
        if path.name not in {"__main__.py", "cli.py"}:
            assert "" not in imports_of(path)[0], ids(path)


def test_nothing_below_the_command_line_imports_it():
    for path in FILES:
        if path.name not in {"__main__.py", "cli.py"}:
            assert "cli" not in imports_of(path)[0], ids(path)


@pytest.mark.parametrize("module", ["skew", "_linear"])
def test_operators_do_not_import_their_judge(module):
    assert "verify" not in imports_of(PACKAGE / f"{module}.py")[0]


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_only_one_module_knows_array_libraries(path):
    _, outside = imports_of(path)
    if path.name != "_array.py":
        assert "array_api_compat" not in outside
    if path.name not in {"_numba.py", "tiles.py"}:
        assert not outside & {"numba", "llvmlite"}
    assert not outside & {"array_api_strict", "pytest", "hypothesis", "mpmath"}


@pytest.mark.parametrize("path", room("core"), ids=ids)
def test_core_is_written_in_the_array_api(path):
    """NumPy itself is for the compiled twins only."""
    if not path.name.startswith("compiled"):
        assert "numpy" not in imports_of(path)[1]


def fresh(script):
    """A script's output in an interpreter that has imported nothing yet."""
    path = [str(PACKAGE.parent)]
    command = [sys.executable, "-I", "-c", f"import sys; sys.path[:0] = {path!r}\n{script}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_importing_the_package_loads_no_optional_library():
    script = f"import {NAME}; print(*(m for m in {HEAVY!r} if m in sys.modules))"
    assert fresh(script) == []


def test_objects_and_checks_of_inputs_load_no_optional_library():
    script = f"""
import numpy as np
from lowrank_expm import LowRankSkew
LowRankSkew(np.ones((5, 2)), np.ones((5, 2))).H.to_dense()
print(*(m for m in {HEAVY!r} if m in sys.modules))
"""
    assert fresh(script) == []
