"""What touches the long axis: two passes, accumulate and update, and the robust basis.

One file a backend; `passes_for` finds it. All have the same functions, with the same arguments.
"""

from types import ModuleType

from .._array import Array, library
from .frame import Frame
from .watch import watching

__all__ = ["Frame", "passes_for", "watching"]


def passes_for(a: Array) -> ModuleType:
    """The passes for arrays of one library."""
    name = library(a)
    if name is None:
        from . import numpy_passes

        return numpy_passes
    if name == "cupy":
        from . import cupy_passes

        return cupy_passes
    from . import portable_passes

    return portable_passes
