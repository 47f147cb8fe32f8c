"""Padé order and number of squarings: a pure function of one norm and the precision.

The thresholds are those of Higham (2005, doi:10.1137/04061101X): up to ``theta`` the diagonal
Padé approximant of that order has a relative backward error below the unit roundoff. Both the
array-API core and its compiled twin call `select`, so they cannot disagree.
"""

ORDERS_64 = (3, 5, 7, 9, 13)
THETAS_64 = (
    1.495585217958292e-2,
    2.539398330063230e-1,
    9.504178996162932e-1,
    2.097847961257068e0,
    5.371920351148152e0,
)
ORDERS_32 = (3, 5, 7)
THETAS_32 = (4.258730016922831e-1, 1.880152677804762e0, 3.925724783138660e0)

# Orders 3 and 5 need no power beyond A⁴, so there the plain norm decides.
PLAIN = 2


def table(eps: float) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The orders and their thresholds for a real dtype whose machine epsilon is `eps`."""
    return (ORDERS_64, THETAS_64) if eps < 1e-10 else (ORDERS_32, THETAS_32)


def select(alpha, orders, thetas):  # type: ignore[no-untyped-def]
    """The order and squarings for a matrix of size `alpha`; −1 squarings if it is not finite."""
    if not alpha < float("inf"):
        return orders[-1], -1
    for i in range(len(orders)):
        if alpha <= thetas[i]:
            return orders[i], 0
    squarings = 0
    while alpha > thetas[-1]:
        alpha = 0.5 * alpha
        squarings += 1
    return orders[-1], squarings
