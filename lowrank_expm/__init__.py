"""exp(t(U Vᴴ − V Uᴴ)) B for tall U and V: linear cost, certified orthogonality."""

from . import derivatives, geometry, verify
from ._version import __version__
from .frechet import LowRankFrechet
from .skew import LowRankSkew, expm_multiply, skew_expm_multiply
from .unitary import Certificate, LowRankUnitary

__all__ = [
    "Certificate",
    "LowRankFrechet",
    "LowRankSkew",
    "LowRankUnitary",
    "__version__",
    "derivatives",
    "expm_multiply",
    "geometry",
    "skew_expm_multiply",
    "verify",
]
