"""DPFL: collaborators by greedy search (Kharrat et al., AISTATS 2025, Algorithm 1).

Shared: nothing; models move along a graph.
Personal: w_i.
Scored: w_i after training, before averaging.
"""

import numpy as np

from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.methods import Federation, Method, State, Tensor

CITATION = """@inproceedings{kharrat2025dpfl,
  title = {{DPFL}: Decentralized Personalized Federated Learning},
  author = {Kharrat, Salma and Canini, Marco and Horv{\\'a}th, Samuel},
  booktitle = {Proceedings of The 28th International Conference on Artificial Intelligence and
            Statistics (AISTATS)},
  series = {Proceedings of Machine Learning Research},
  volume = {258}, pages = {5086--5094}, publisher = {PMLR}, year = {2025},
  note = {arXiv:2406.06520}
}"""
METHOD = Method(
    "DPFL", CITATION, ignores=("graphs",), preprocesses=True, elementwise=True, look="#0072B2 X"
)


def init(fed: Federation) -> State:
    """Return the state after preprocessing: averaged rows and the collaboration graph Omega."""
    w = fed.local_opt(fed.common_row(), epochs=fed.run.tau_init)  # line 2
    fed.evaluate(w)
    with fed.clock("graph"):
        omega = fed.bggc(w)  # line 3
    fed.narrow(omega)
    w = fed.average(w, omega)  # line 4
    fed.evaluate(w, "mixed")
    return {"client": {"w": w}, "shared": {"omega": omega, "chosen": omega}}


def round(fed: Federation, state: State, t: int) -> State:
    w, omega, chosen = state["client"]["w"], state["shared"]["omega"], state["shared"]["chosen"]
    w = fed.local_opt(w, epochs=fed.run.tau_train)  # line 8
    fed.evaluate(w)  # the model the paper reports: trained, not yet averaged
    # Paper: all clients stay; with --churn new clients search (line 3), and clients that lost
    # neighbours look for as many others
    before, omega = omega, fed.repaired(omega, lambda candidates: fed.bggc(w, candidates))
    chosen = along_new(chosen, before, omega)
    # Paper: Omega is searched once, the default; with --omega_period lines 3 and 4
    # replace lines 9 to 11
    if t % fed.run.omega_period == 0:
        with fed.clock("graph"):
            found = fed.bggc(w)
        omega, chosen = found.where(fed.learners, omega), found.where(fed.learners, chosen)
        fed.narrow(omega)
        w = fed.average(w, chosen)
    else:
        w, chosen = average_chosen(fed, w, omega, chosen, t)
    fed.evaluate(w, "mixed")
    return {"client": {"w": w}, "shared": {"omega": omega, "chosen": chosen}}


def along_new(
    chosen: CollaborationGraph, before: CollaborationGraph, omega: CollaborationGraph
) -> CollaborationGraph:
    """Return the last choice, and in its place the new Omega of clients whose Omega changed.

    They average along it until line 10 comes next, as all do before round 1.
    """
    if omega is before:
        return chosen
    same = [np.array_equal(before.of(k), omega.of(k)) for k in range(omega.n)]
    return chosen.where(np.array(same), omega)


def average_chosen(
    fed: Federation,
    w: Tensor,
    omega: CollaborationGraph,
    chosen: CollaborationGraph,
    t: int,
) -> tuple[Tensor, CollaborationGraph]:
    """Return the rows after lines 9 to 11, and whom each client chose; `chosen` was last."""
    if t % fed.run.ggc_period == 0:
        received = fed.exchange(w, omega)  # line 9
        with fed.clock("graph"):
            found = fed.ggc(w, received)  # line 10
        chosen = found.where(fed.learners, chosen)  # an absent client's choice stays
        w = fed.average(w, chosen, received)  # line 11; Omega itself is kept
    elif fed.run.ggc_off_rounds == "reuse":
        # Paper: only line 10 is periodic, so the last choice is fetched and averaged
        w = fed.average(w, chosen)
    return w, chosen
