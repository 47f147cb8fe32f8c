"""Names, docstrings, and that both say the same as the code."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import lowrank_expm

# A command, and modules that need a library which may not be there.
NEED_MORE = {"cli", "nn", "distributed"}
FACES = sorted(
    f"{lowrank_expm.__name__}.{info.name}"
    for info in pkgutil.iter_modules(lowrank_expm.__path__)
    if not info.name.startswith("_") and not info.ispkg and info.name not in NEED_MORE
)
PUBLIC = [lowrank_expm.__name__, *FACES]
MODULES = [importlib.import_module(name) for name in PUBLIC]
SECTION = re.compile(r"^(\w[\w ]*)\n-{3,}$", re.MULTILINE)


def defined(module):
    """What a module defines itself under a public name."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__ == module.__name__
    }


def functions():
    for module in MODULES:
        for name, value in defined(module).items():
            if inspect.isfunction(value) and name in module.__all__:
                yield pytest.param(value, id=f"{module.__name__}.{name}")


def classes():
    for module in MODULES:
        for name, value in defined(module).items():
            if inspect.isclass(value) and name in module.__all__:
                yield pytest.param(value, id=f"{module.__name__}.{name}")


def members(cls):
    """Methods and properties that a class defines itself."""
    for name, value in vars(cls).items():
        if name.startswith("_") and name != "__matmul__":
            continue
        if isinstance(value, property):
            yield name, value.fget
        elif inspect.isfunction(value):
            yield name, value


def sections(value):
    return SECTION.findall(inspect.getdoc(value) or "")


def parameters(value):
    """Parameters that a caller names."""
    return [p for p in inspect.signature(value).parameters if p != "self"]


@pytest.mark.parametrize("module", MODULES, ids=PUBLIC)
def test_all_lists_what_is_there(module):
    assert sorted(module.__all__) == sorted(set(module.__all__))
    for name in module.__all__:
        assert hasattr(module, name)


@pytest.mark.parametrize("module", MODULES[1:], ids=PUBLIC[1:])
def test_all_is_what_a_module_defines(module):
    """Helpers have an underscore; nothing is public by accident, nothing left out."""
    assert set(module.__all__) == set(defined(module))


@pytest.mark.parametrize("module", MODULES, ids=PUBLIC)
def test_star_import_works(module):
    names = {}
    exec(f"from {module.__name__} import *", names)
    assert set(module.__all__) <= set(names)


def test_the_package_has_the_promised_names():
    promised = {"skew_expm_multiply", "expm_multiply", "LowRankSkew", "LowRankUnitary", "verify"}
    assert promised <= set(lowrank_expm.__all__)
    measures = {"orthogonality_defect", "basis_condition", "expm_condition", "check", "Report"}
    assert measures <= set(lowrank_expm.verify.__all__)


def test_the_package_exports_all_of_its_front_modules():
    for module in (lowrank_expm.skew, lowrank_expm.unitary):
        assert set(module.__all__) <= set(lowrank_expm.__all__)


def test_version_is_one():
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", lowrank_expm.__version__)


def test_package_is_typed():
    assert (Path(lowrank_expm.__file__).parent / "py.typed").exists()


@pytest.mark.parametrize("path", sorted(Path(lowrank_expm.__file__).parent.rglob("*.py")), ids=str)
def test_every_module_says_what_it_is_for(path):
    tree = compile(path.read_text(encoding="utf-8"), str(path), "exec", dont_inherit=True)
    assert tree.co_consts
    assert isinstance(tree.co_consts[0], str) or path.name == "_version.py"


@pytest.mark.parametrize("module", MODULES, ids=PUBLIC)
def test_every_definition_has_a_docstring(module):
    for name, value in defined(module).items():
        assert inspect.getdoc(value), name
        if inspect.isclass(value):
            for member, function in members(value):
                assert inspect.getdoc(function), f"{name}.{member}"


@pytest.mark.parametrize("function", list(functions()))
def test_public_functions_have_numpydoc_sections(function):
    found = sections(function)
    assert {"Parameters", "Returns", "Examples", "Notes"} <= set(found)
    assert ">>> " in inspect.getdoc(function)
    order = ["Parameters", "Returns", "Raises", "See Also", "Notes", "Examples"]
    assert [s for s in order if s in found] == found


@pytest.mark.parametrize("function", list(functions()))
def test_documented_parameters_are_the_parameters(function):
    doc = inspect.getdoc(function)
    body = doc.split("Parameters\n----------\n")[1].split("\n\n")[0]
    named = [
        name.strip()
        for line in body.splitlines()
        if not line.startswith(" ")
        for name in line.split(" : ")[0].split(",")
    ]
    assert named == parameters(function)


@pytest.mark.parametrize("cls", list(classes()))
def test_public_classes_document_their_members(cls):
    if issubclass(cls, float):
        return
    assert {"Attributes", "Parameters"} & set(sections(cls))
    for name, function in members(cls):
        if inspect.isfunction(vars(cls)[name]) and name != "__matmul__":
            found = sections(function)
            assert "Returns" in found, name
            if parameters(function):
                assert "Parameters" in found, name


@pytest.mark.parametrize("cls", [lowrank_expm.LowRankSkew, lowrank_expm.LowRankUnitary])
def test_operators_have_examples(cls):
    assert "Examples" in sections(cls)
    assert "Notes" in sections(cls)


def documented():
    """Public functions and classes, and the methods of these."""
    yield from functions()
    for param in classes():
        yield param
        for name, value in vars(param.values[0]).items():
            value = value.__func__ if isinstance(value, classmethod) else value
            if inspect.isfunction(value) and not name.startswith("_"):
                yield pytest.param(value, id=f"{param.id}.{name}")


@pytest.mark.parametrize("value", list(documented()))
def test_every_public_docstring_has_an_example(value):
    """Doctest runs them."""
    assert "Examples" in sections(value)
    assert ">>> " in inspect.getdoc(value)


def test_sources_of_the_mathematics_are_cited():
    text = (lowrank_expm.skew_expm_multiply.__doc__, lowrank_expm.verify.expm_condition.__doc__)
    assert all("doi:10." in t or "arXiv" in t for t in text)


def test_methods_have_the_promised_signatures():
    S, Q = lowrank_expm.LowRankSkew, lowrank_expm.LowRankUnitary
    signatures = {
        lowrank_expm.skew_expm_multiply: ["U", "V", "B", "t", "method", "out"],
        lowrank_expm.expm_multiply: ["L", "R", "B", "t", "out"],
        S: ["U", "V", "method"],
        S.expm: ["t"],
        S.expm_multiply: ["B", "t", "out"],
        S.norm: ["ord"],
        S.angles: [],
        S.to_dense: [],
        Q.to_dense: [],
        Q.aslinearoperator: [],
        Q.orthogonality_defect: [],
        lowrank_expm.verify.check: ["U", "V", "B", "t", "method", "derivatives"],
        lowrank_expm.verify.basis_condition: ["U", "V"],
        lowrank_expm.verify.expm_condition: ["S", "t"],
        lowrank_expm.verify.orthogonality_defect: ["Q"],
    }
    for function, expected in signatures.items():
        assert parameters(function) == expected
        for name in set(expected) & {"method", "out"}:
            kind = inspect.signature(function).parameters[name].kind
            assert kind is inspect.Parameter.KEYWORD_ONLY
