"""Taylor degree and number of squarings: a pure function of one norm and the precision.

Up to ``theta`` the Taylor polynomial of exp of that degree has a relative backward error below
the unit roundoff u: it is the exponential of A + ΔA with ‖ΔA‖ ≤ u‖A‖ (Al-Mohy and Higham 2011,
doi:10.1137/100788860, equation 3.6). Both the array-API core and its compiled twin call `select`,
so they cannot disagree. The degrees are those that Paterson and Stockmeyer's scheme reaches with
the same number of products as smaller ones; beyond the last of each precision a doubling is
cheaper and loses no digits, where terms of size e^θ would cancel.
"""

ORDERS_64 = (4, 6, 9, 12, 16, 20, 25)
THETAS_64 = (
    3.397168839976961e-4,
    9.065656407595101e-3,
    8.957760203223342e-2,
    2.9961589138115805e-1,
    7.8028742566265743e-1,
    1.4382525968043369e0,
    2.4285825244428264e0,
)
ORDERS_32 = (4, 6, 9, 12, 16)
THETAS_32 = (
    5.1166193634450862e-2,
    2.4952893228466977e-1,
    7.7951133743580307e-1,
    1.4616615072090336e0,
    2.4782808775219714e0,
)

# Up to the third order no power beyond A³ is needed, so there the plain norm decides.
PLAIN = 3


def table(eps: float) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The orders and their thresholds for a real dtype whose machine epsilon is `eps`."""
    return (ORDERS_64, THETAS_64) if eps < 1e-10 else (ORDERS_32, THETAS_32)


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
