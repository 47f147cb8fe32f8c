"""Integrals of the water molecule, by PySCF; run as a script, it writes water.npz.

python -m pip install pyscf && python notebooks/data/water.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from pyscf import ao2mo, gto, scf

# The experimental geometry: 0.9572 Å and 104.52°.
WATER = "O 0 0 0; H 0.9572 0 0; H -0.239987 0.926627 0"


def integrals(basis: str = "6-31g") -> dict[str, np.ndarray]:
    """What restricted Hartree–Fock needs, and the energies of PySCF's own run."""
    molecule = gto.M(atom=WATER, basis=basis, verbose=0)
    method = scf.RHF(molecule).set(conv_tol=1e-13, conv_tol_grad=1e-8)
    energies: list[float] = []
    method.callback = lambda state: energies.append(state["e_tot"])
    converged = method.kernel(dm0=method.get_init_guess(key="hcore"))
    return {
        "overlap": molecule.intor("int1e_ovlp"),
        "core": method.get_hcore(),
        "repulsion": ao2mo.restore(8, molecule.intor("int2e"), molecule.nao),
        "nuclear": np.array(molecule.energy_nuc()),
        "occupied": np.array(molecule.nelectron // 2),
        "energy": np.array(converged),
        "cycles": np.array(energies),
    }


if __name__ == "__main__":
    np.savez(Path(__file__).with_suffix(".npz"), **integrals())
