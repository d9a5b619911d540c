"""FedSim: averages weighted by similarity (Listo Zec et al., arXiv 2409.10720).

Shared: nothing; models move along a graph.
Personal: w_i.
Scored: w_i after training, before averaging.

Neighbours are drawn as in DAC. w_i becomes sum_j s_ij w_j / sum_j s_ij over them and itself.

Paper: only its abstract and summaries could be read. Decided here: s_ii is the similarity of w_i
    with itself, a negative s_ij counts as 0, s is not scaled, and the default is the cosine of
    weights.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

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


def round(fed: Federation, state: State, t: int) -> State:
    return dac.round(fed, state, t, weights)


def weights(fed: Federation, w: Tensor, s: np.ndarray) -> np.ndarray:
    """Return s_ij, at least 0, and s_ii of each client itself, `[K, N]`."""
    out = np.maximum(s, 0)
    for i, k in enumerate(fed.ids):
        if fed.learners[k]:  # an absent or diverged client scores nothing
            out[i, k] = dac.similarity(fed, i, w[i], w[i : i + 1])[0]
    return out
