"""Scheme, order and number of squarings: a pure function of one norm, m and the precision.

Up to ``theta`` the Taylor polynomial of exp of that degree has a relative backward error below
the unit roundoff u: it is the exponential of A + ΔA with ‖ΔA‖ ≤ u‖A‖ (Al-Mohy and Higham 2011,
doi:10.1137/100788860, equation 3.6). Both the array-API core and its compiled twin call `select`,
so they cannot disagree about it. The degrees are those that Paterson and Stockmeyer's scheme
reaches with the same number of products as smaller ones; beyond the last of each precision a
doubling costs as much as the next one and loses fewer digits, where terms of size e^θ cancel.

The diagonal Padé approximant reaches further (Higham 2005, doi:10.1137/04061101X) but needs a
solve. The compiled core takes it for the sizes that `pade_sizes` gives: measured, not proved.
"""

ORDERS_64 = (4, 6, 9, 12, 16, 20, 25, 30)
THETAS_64 = (
    3.397168839976961e-4,
    9.065656407595101e-3,
    8.957760203223342e-2,
    2.9961589138115805e-1,
    7.8028742566265743e-1,
    1.4382525968043369e0,
    2.4285825244428264e0,
    3.5396663487436895e0,
)
ORDERS_32 = (4, 6, 9, 12, 16, 20)
THETAS_32 = (
    5.1166193634450862e-2,
    2.4952893228466977e-1,
    7.7951133743580307e-1,
    1.4616615072090336e0,
    2.4782808775219714e0,
    3.5509262147064953e0,
)

# Where the third order is: up to it, no power beyond A³ is needed, and up to the second, where even
# the norm of A² could not save a product, the plain norm decides.
PLAIN, SMALL = 2, 1

# Order and threshold of the Padé approximant; no degree above, so that an order tells which it is.
PADE_64 = ((13,), (5.371920351148152,))
PADE_32 = ((7,), (3.925724783138660,))

# The most columns of a matrix for which the Padé approximant is taken: for all large ones, since a
# halving saved outweighs its solve; and only where it saves all doublings and the polish.
NARROW = 4
WIDE_64 = 32
WIDE_32 = 12


def table(eps: float) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The orders and their thresholds for a real dtype whose machine epsilon is `eps`."""
    return (ORDERS_64, THETAS_64) if eps < 1e-10 else (ORDERS_32, THETAS_32)


def pade_table(eps: float) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The same for the Padé approximant."""
    return PADE_64 if eps < 1e-10 else PADE_32


def pade_sizes(m: int, eps: float) -> tuple[float, float]:
    """Above which size of an m × m matrix the Padé approximant is taken, and up to which.

    Below the first the polynomial is cheaper; up to the second the approximant needs no doubling.
    """
    low = table(eps)[1][-2]
    if m <= NARROW:
        return low, float("inf")
    wide = WIDE_64 if eps < 1e-10 else WIDE_32
    return low, pade_table(eps)[1][-1] if m <= wide else low


def select(alpha, orders, thetas):  # type: ignore[no-untyped-def]
    """The order and squarings for a matrix of size `alpha`; −1 squarings if it is not finite."""
    if not alpha < float("inf"):
        return orders[-1], -1
    squarings = 0
    while alpha > thetas[-1]:
        alpha = 0.5 * alpha
        squarings += 1
    i = 0
    while alpha > thetas[i]:
        i += 1
    return orders[i], squarings
