"""Files that need a library which is not installed are not collected: they are no skipped tests."""

import shutil
from importlib.util import find_spec
from pathlib import Path

NEEDS = {
    "torch": [
        "lowrank_expm/nn.py",
        "lowrank_expm/distributed.py",
        "lowrank_expm/experiments",
        "tests/test_nn.py",
        "tests/test_distributed.py",
        "tests/test_experiments.py",
        "tests/torch_step.py",
        "docs/guide/attention.md",
    ],
    "jax": ["lowrank_expm/core/differentiable.py"],
    "dask": [],
    "geoopt": ["tests/test_geometry_peers.py"],
}
HERE = Path(__file__).parent


def _needing(library: str) -> list[str]:
    """What a library's absence leaves out."""
    own = [
        f"docs/guide/{library}.md",
        f"lowrank_expm/_{library}.py",
        f"lowrank_expm/passes/{library}_passes.py",
    ]
    tests = [str(p.relative_to(HERE)) for p in sorted(HERE.glob(f"tests/test_{library}*.py"))]
    commands = [f"tests/{library}_speed.py"]
    return [*NEEDS[library], *own, *tests, *commands]


OPTIONAL = [path for name in NEEDS for path in _needing(name)]
collect_ignore = [path for name in NEEDS if find_spec(name) is None for path in _needing(name)]
if find_spec("cuda") is None or shutil.which("g++") is None:
    collect_ignore.append("tests/test_cuda.py")

if __name__ == "__main__":
    present = [path for path in (*OPTIONAL, "tests/test_cuda.py") if (HERE / path).exists()]
    print(*present)
