"""`Received`: the models that arrived along a graph, wherever they lie: rows of this rank, or slots of its window.

Axes: K clients on this rank, k in a block, W row width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dpfl_mpi.graph import CollaborationGraph, Senders
from dpfl_mpi.mpi.window import Plan, plan
from dpfl_mpi.numerics.ensemble import check_fixed_point, fixed_point, from_fixed_point

if TYPE_CHECKING:
    from dpfl_mpi.federation import Federation


class Received:
    """The models that arrived along a graph. Usually all at once; where the graph is wider than the window, in passes.

    Edges inside a rank are rows of `w` and were never sent.
    """

    def __init__(self, fed: Federation, w_KW: Tensor, graph: CollaborationGraph, whole: Plan | None = None):
        self.fed, self.w, self.graph = fed, w_KW, graph
        self.now, self.width = fed.passes(graph) if whole is None else (whole, 0)
        if self.now is not None:
            fed.put(w_KW, self.now)

    def rows(self, senders: Senders) -> Tensor:
        """Return the models of these senders, `[k, W]` on the device: a local row, or a copy out of the window."""
        fed = self.fed
        assert self.now is not None and fed.inbox is not None
        here = fed.owner[senders] == fed.world.rank
        if len(senders) == 1:
            j = senders[0]
            row = (
                self.w[fed.row_of[j]] if here[0] else torch.from_numpy(fed.inbox.take(self.now.slot[j])).to(fed.device)
            )
            return row[None]
        out = self.w[torch.from_numpy(np.where(here, fed.row_of[senders], 0)).to(fed.device)]  # one gather, no loop
        for i in np.flatnonzero(~here).tolist():
            out[i] = torch.from_numpy(fed.inbox.take(self.now.slot[senders[i]]))
        return out

    def one_by_one(self, b: slice, lists: Sequence[Senders]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each position of the block's lists of senders: one model a client, `[k, W]`, and its p, float64 `[k]`.

        Where a client's list has ended it is its own model with p = 0.
        """
        fed = self.fed
        for position in range(max((len(s) for s in lists), default=0)):
            here = [position < len(s) for s in lists]
            j = [int(s[position]) if on else int(k) for s, k, on in zip(lists, fed.ids[b], here, strict=True)]
            yield self.rows(j), fed.column(fed.p[j] * here)[:, 0]

    def in_order(self, orders: Sequence[Senders]) -> Iterator[tuple[Received, list[Senders]]]:
        """Yield, pass by pass, the next senders of each local client in its given order, all present while they are used.

        One pass where everything is here already; else the order itself is cut into passes of the window's width. Collective.
        """
        if not self.width:
            yield self, list(orders)
            return
        fed, width = self.fed, self.width
        longest = fed.world.spread(np.array([max(map(len, orders), default=0)], np.float64))[0, 2]
        for first in range(0, int(longest), width):
            now = [s[first : first + width] for s in orders]
            self.now = plan(fed.collect(now), fed.owner, fed.row_of, fed.world.rank, fed.world.size)
            fed.put(self.w, self.now)
            yield self, now

    def start_sums(self) -> tuple[Tensor, np.ndarray]:
        """Return the exact sum of p_i w_i over each client and its senders, float64 `[K, W]`, and its sum of p `[K]`."""
        fed = self.fed
        lists = [self.graph.of(k) for k in fed.ids]
        total = torch.zeros(fed.k, fed.ensemble.width, dtype=torch.int64, device=fed.device)
        check_fixed_point(self.w[np.flatnonzero(fed.active[fed.ids])])
        for held, now in self.in_order(lists):
            for b in fed.blocks:
                for rows, p_k in held.one_by_one(b, now[b]):
                    total[b] += fixed_point(rows, p_k)
        for b in fed.blocks:
            total[b] += fixed_point(self.w[b], fed.column(fed.p[fed.ids[b]] * fed.active[fed.ids[b]])[:, 0])
        return from_fixed_point(total), np.array(
            [math.fsum([fed.p[k], *fed.p[s]]) for k, s in zip(fed.ids, lists, strict=True)]
        )
