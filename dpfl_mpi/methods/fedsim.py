"""FedSim: averages weighted by similarity (in the way of Listo Zec et al., arXiv 2409.10720).

Shared: nothing; models move along a graph.
Personal: w_i.
Scored: w_i after training, before averaging.

Neighbours are drawn as in DAC. w_i becomes sum_j s_ij w_j / sum_j s_ij over them and itself.

With `weights` chances, w_j counts by the chance with which j was drawn in this round, and w_i by
the largest of these.

Paper: only its abstract, summaries and its authors' code could be read. Decided here: s_ii is the
    similarity of w_i with itself, a negative s_ij counts as 0, s is not scaled, and the default is
    the cosine of weights.
Paper: the authors' code (tomhagander/decentralized_deep_learning) weighs by chances. There tau is
    fixed, 0.5 to 5,000 depending on the similarity; here it grows as in DAC.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.methods import OWN_GRAPH, Federation, Method, State, Tensor, dac
from dpfl_mpi.settings import option

CITATION = """@article{listozec2024similarity,
  title = {On the effects of similarity metrics in decentralized deep learning
    under distributional shift},
  author = {Listo Zec, Edvin and Hagander, Tom and Ihre-Thomason, Eric and Girdzijauskas, Sarunas},
  journal = {arXiv:2409.10720}, year = {2024}
}"""
METHOD = Method(
    "FedSim", CITATION, searches=False, sends_models=False, ignores=OWN_GRAPH, look="#56B4E9 :"
)
init = dac.init


@dataclass(frozen=True)
class Options(dac.Options):
    similarity: Literal["loss", "cosine", "update"] = option(
        "cosine", "cosine of the weights, or of their changes; 1 / loss"
    )
    weights: Literal["similarity", "chances"] = option(
        "similarity", "a sender counts by similarity, or by the chance of its draw", added=True
    )


def round(fed: Federation, state: State, t: int) -> State:
    if fed.options["weights"] == "similarity":
        return dac.round(fed, state, t, similarities)
    log_chance = dac.temperature(fed.options["tau"], t) * state["client"]["s"]
    return dac.round(fed, state, t, partial(chances, log_chance))


def similarities(
    fed: Federation, w: Tensor, s: np.ndarray, chosen: CollaborationGraph
) -> np.ndarray:
    """Return s_ij, at least 0, and s_ii of each client itself, `[K, N]`."""
    out = np.maximum(s, 0)
    for i, k in enumerate(fed.ids):
        if fed.learners[k]:  # an absent or diverged client scores nothing
            out[i, k] = dac.similarity(fed, i, w[i], w[i : i + 1])[0]
    return np.nan_to_num(out)  # the loss of an exploded model may be NaN


def chances(
    log_chance: np.ndarray, fed: Federation, w: Tensor, s: np.ndarray, chosen: CollaborationGraph
) -> np.ndarray:
    """Return the chance of each sender's draw as a share of the largest, and 1 for oneself."""
    out = np.zeros_like(s)
    for i, k in enumerate(fed.ids):
        senders = chosen.of(k)
        if len(senders):
            log_p = log_chance[i, senders]
            out[i, senders] = np.exp(log_p - log_p.max())
            out[i, k] = 1
    return out
