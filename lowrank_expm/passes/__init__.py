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
    if library(a) is None:
        from . import numpy_passes

        return numpy_passes
    from . import portable_passes

    return portable_passes
