"""Sketch: models with the most similar signatures (in the way of SemanticDFL, Dogani et al., 2026).

Shared: a signature of each client, to all; models move along a graph.
Personal: w_i.
Scored: w_i after training, before averaging.

A signature is the P entries of w_i - w_0 of largest absolute value; w_0 is the common initial row.
A client averages with the B_c - 1 clients whose signatures have the largest cosine with its own.

Paper: what a signature is made of, and the cosine, are decided here; the overlay network is left
    out.
"""

from dataclasses import dataclass

import numpy as np

from dpfl_mpi.methods import OWN_GRAPH, Federation, Method, State, Tensor, local
from dpfl_mpi.methods._senders import highest
from dpfl_mpi.settings import option

CITATION = """@misc{dogani2026semanticdfl,
  title = {{SemanticDFL}: Similarity-Aware Pull-based Personalized Decentralized
    Federated Learning},
  author = {Dogani, Javad and Khastkhodaei, Mostafa and Khunjush, Farshad and
            Laoutaris, Nikolaos}, year = {2026},
  note = {https://hdl.handle.net/20.500.12761/2024}
}"""
METHOD = Method(
    "Sketch", CITATION, searches=False, sends_models=False, ignores=OWN_GRAPH, look="#0072B2 :"
)


@dataclass(frozen=True)
class Options:
    entries: int = option(256, "P, the entries of a signature, 8 bytes each", low=1)


init = local.init


def round(fed: Federation, state: State, t: int) -> State:
    w = fed.local_opt(state["client"]["w"], epochs=fed.run.tau_train)
    fed.evaluate(w)
    where, size = signatures(w - fed.initial_row(), fed.options["entries"])
    similarity = cosines(fed.ids, fed.tell(where), fed.tell(size), w.shape[1])
    senders = []
    for k, row in zip(fed.ids, similarity, strict=True):
        senders.append(highest(fed.reachable(k), row, fed.most_senders[k]))
    chosen = fed.collect(senders)
    w = fed.average(w, chosen)
    fed.evaluate(w, "mixed")
    return {"client": {"w": w}, "shared": {"chosen": chosen}}


def signatures(moved: Tensor, entries: int) -> tuple[np.ndarray, np.ndarray]:
    """Return where each row's largest entries are, int32 `[K, P]`, and the entries, float32."""
    where = moved.abs().sort(dim=1, descending=True, stable=True).indices[:, :entries]
    return where.int().cpu().numpy(), moved.gather(1, where).cpu().numpy()


def cosines(ids: np.ndarray, where: np.ndarray, size: np.ndarray, width: int) -> np.ndarray:
    """Return the cosine of local clients' signatures with those of all, float64 `[K, N]`.

    A signature, entries `size` `[N, P]` at `where`, stands for a row of `width`, else 0.
    """
    size = size.astype(np.float64)
    norm = np.maximum(np.sqrt((size**2).sum(1)), 1e-12)
    out = np.zeros((len(ids), len(size)))
    for i, k in enumerate(ids):
        row = np.zeros(width)
        row[where[k]] = size[k]
        out[i] = (row[where] * size).sum(1) / (norm[k] * norm)
    return out
