"""What several methods choose: senders at random, by score or of one cluster; the least loss."""

import numpy as np

from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.methods import Federation


def random_graph(fed: Federation) -> CollaborationGraph:
    """Return a graph of B_c - 1 random senders per client, drawn in each round. Collective."""
    most = fed.most_senders
    return fed.collect([fed.shuffle(k, fed.reachable(k), first=most[k]) for k in fed.ids])


def highest(candidates: np.ndarray, score_N: np.ndarray, limit: int) -> np.ndarray:
    """Return the `limit` candidates with the highest scores; equal ones keep their order."""
    return candidates[np.argsort(-score_N[candidates], kind="stable")[:limit]]


def least(losses: np.ndarray) -> int:
    """Return the number of the lowest loss; NaN, of an exploded model, counts as the highest."""
    return int(np.argmin(np.where(np.isnan(losses), np.inf, losses)))


def same_cluster(fed: Federation, cluster_N: np.ndarray) -> CollaborationGraph:
    """Return the graph of active clients that are in the same cluster. Collective."""
    alike = (cluster_N == cluster_N[fed.ids, None]) & fed.active & fed.active[fed.ids, None]
    alike[np.arange(len(alike)), fed.ids] = False
    return fed.collect([np.flatnonzero(row) for row in alike])
