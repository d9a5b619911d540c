"""Senders that several methods choose: at random, or by the highest score."""

import numpy as np

from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.methods import Federation


def random_graph(fed: Federation) -> CollaborationGraph:
    """Return a graph of B_c - 1 random senders per client, drawn in each round. Collective."""
    return fed.collect([fed.shuffle(k, fed.reachable(k))[: fed.most_senders[k]] for k in fed.ids])


def highest(candidates: np.ndarray, score_N: np.ndarray, limit: int) -> np.ndarray:
    """Return the `limit` candidates with the highest scores; equal ones keep their order."""
    return candidates[np.argsort(-score_N[candidates], kind="stable")[:limit]]
