"""What touches the long axis: two passes, accumulate and update, and the robust basis."""

from .frame import Frame
from .watch import watching

__all__ = ["Frame", "watching"]
