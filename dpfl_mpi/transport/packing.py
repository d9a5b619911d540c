"""What of a client's model travels: all columns, some (--send), or the messages of a codec.

A row is one model: `size` weights in a line, padded with zeros to W. A window is memory of a rank
that other ranks write into. At each exchange `Mailroom` lets a `Packing` stage rows, i.e. copy them
into host memory that MPI sends (`pack`), and read those that arrived in the window (`unpack`). Rows
have numbers: j + a N is what client j sent a rounds ago (`Ages` in links.py). `Encoded` sends
messages instead of columns.
"""

import numpy as np
import torch
from torch import Tensor

from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.mpi.window import Inbox, Route
from dpfl_mpi.numerics.ensemble import Ensemble
from dpfl_mpi.transport.codec import Int8, TopK
from dpfl_mpi.transport.links import Ages, Links

SPAN = 2**32  # in keys of encoded rows; no client encodes its row so often
NO_KEYS = np.zeros(0, np.int64)


class Packing:
    """Sends all columns of a row, which are read in the window, or some, which are copied there."""

    encodes = False

    def __init__(self, ensemble: Ensemble, ages: Ages, columns_W: Tensor | None):
        """Send the columns that bool `columns_W` `[W]` marks; None: all."""
        self.ensemble, self.ages, self.placement = ensemble, ages, ages.placement
        self.columns = columns_W
        self.in_place = columns_W is None and not self.encodes  # rows are read in the window
        self.k = len(self.placement.ids)
        # one-sided calls on a GPU's memory crash, or return wrong rows (pmodels/mpich 7619, 7340):
        # MPI sees host memory alone, page-locked where a GPU copies from and to it
        self.on_gpu = ensemble.device.type == "cuda"
        self.landed: Tensor | None = None  # on a GPU, a copy of the rows in the window
        self._sent_columns: slice | Tensor = slice(ensemble.size)
        count = ensemble.size
        if columns_W is not None:
            self._sent_columns = torch.nonzero(columns_W[: ensemble.size])[:, 0]
            count = len(self._sent_columns)
        self.row_bytes = 4 * count  # of a row that is sent whole, on a network
        self.staged: list[Tensor] = []  # by window: host memory of the rows that MPI sends
        width = ensemble.width if self.in_place else count  # whole rows travel with their padding
        self.staged.append(torch.zeros(ages.count * self.k, width, pin_memory=self.on_gpu))
        # the rows that this rank's clients sent in this round, and in earlier ones if --staleness
        # lets them count. Receivers on this rank read them here, as a method may train on before
        # it averages.
        self.outgoing = self.staged[0]
        if not self.in_place or self.on_gpu:
            self.outgoing = ensemble.zeros(ages.count * self.k)
        # the present rows of this rank's clients: they supply the columns that are not sent
        self.local_rows = self.outgoing[: self.k]
        self._store: dict[int, Tensor] = {}  # unpacked rows of other ranks by key

    def begin(self) -> None:
        """Start a round: the rows that were sent in the last one are now a round older."""
        if self.ages.count > 1 and self.k:
            self.outgoing[self.k :] = self.outgoing[: -self.k].clone()

    def leaving(self, w_KW: Tensor, active: np.ndarray, in_rounds: bool) -> Tensor:
        """Return this rank's rows as receivers will have them, `[K, W]`. Collective."""
        return w_KW

    def same(self, a_KW: Tensor, b_KW: Tensor, active: np.ndarray) -> bool:
        """Return whether this rank's active clients, bool `[N]`, have the same rows in both."""
        rows = np.flatnonzero(active[self.placement.ids])
        return torch.equal(a_KW[rows], b_KW[rows])

    def count_bytes(self, to: np.ndarray, of: np.ndarray, in_rounds: bool) -> np.ndarray:
        """Return the bytes that a network carries from each sender `of` to its receiver, `[E]`."""
        return np.full(len(of), self.row_bytes)

    def complete(self, rows_kW: Tensor, own_kW: Tensor) -> Tensor:
        """Return rows that arrived, with the receivers' own numbers in columns never sent."""
        return rows_kW if self.columns is None else torch.where(self.columns, rows_kW, own_kW)

    def split(self, graph: CollaborationGraph) -> tuple[list[CollaborationGraph], np.ndarray]:
        """Return each window's part of a graph, and the keys of rows to store after (`keep`)."""
        return [graph], NO_KEYS

    def pack(self, window: int) -> None:
        """Copy what this rank sends through a window to host memory, unless it lies there."""
        if self.outgoing is not self.staged[0]:
            columns = slice(None) if self.in_place else self._sent_columns
            self.staged[0].copy_(self.outgoing[:, columns])

    def unpack(self, window: int, route: Route, inbox: Inbox) -> None:
        """Store the rows that arrived in a window, unless they are read in place."""
        self.landed = None  # frees its memory for the next copy
        if not self.in_place:
            self._store = self._rows_in(inbox, route)
        elif self.on_gpu:
            self.landed = self._on_device(inbox, len(route.arriving))

    def _on_device(self, inbox: Inbox, count: int) -> Tensor:
        """Return the first `count` rows of a window: on a GPU copies, on a CPU a view."""
        view, staged = inbox.view[:count], self.staged[0]
        if not self.on_gpu:
            return torch.from_numpy(view)
        rows = torch.empty(view.shape, device=self.ensemble.device)
        # through the page-locked memory of rows that were sent: they are staged anew each time
        for start in range(0, count, max(1, len(staged))):
            part = staged[: count - start]
            part.numpy()[:] = view[start : start + len(part)]
            rows[start : start + len(part)].copy_(part)  # waits, as `part` is used again
        return rows

    def _rows_in(self, inbox: Inbox, route: Route) -> dict[int, Tensor]:
        """Return by key the rows of width W whose sent columns arrived in a window."""
        rows, keys = {}, self._keys(route.arriving).tolist()
        for key, arrived in zip(keys, self._on_device(inbox, len(keys)), strict=True):
            rows[key] = self.ensemble.zeros(1)[0]
            rows[key][self._sent_columns] = arrived
        return rows

    def unpacked(self, numbers: np.ndarray) -> dict[int, Tensor] | None:
        """Return unpacked rows of other ranks by number; None if they are read in place."""
        if self.in_place:
            return None
        keys = self._keys(numbers).tolist()
        return {j: self._store[key] for j, key in zip(numbers.tolist(), keys, strict=True)}

    def keep(self, keys: np.ndarray) -> None:
        """Drop the stored rows that are not among these keys of all ranks."""

    def _keys(self, numbers: np.ndarray) -> np.ndarray:
        """Return the keys under which rows with these numbers are stored."""
        return numbers

    def state(self) -> tuple[dict[str, Tensor | np.ndarray], dict[str, np.ndarray]]:
        """Return what a checkpoint stores: of this rank's clients `[K, ...]`, and of all ranks."""
        if self.ages.count == 1:
            return {}, {}
        rows = self.outgoing.view(self.ages.count, self.k, self.ensemble.width)
        return {"versions": rows.transpose(0, 1)}, {}


class Encoded(Packing):
    """Sends whole rows through one window, and messages of a codec through a second one.

    A message says how a client's row has changed since its last encoding. A rank that stores the
    last one needs only the message; a rank that lacks it gets the new row whole.
    """

    encodes = True

    def __init__(self, codec: Int8 | TopK, ages: Ages, start_W: Tensor, budgets: np.ndarray):
        """Encode from the common initial row; client k stores `budgets[k]` rows of others."""
        super().__init__(codec.ensemble, ages, codec.columns_W)
        width = -(-codec.bytes // 4)  # of a message, in float32 numbers, rounded up
        self.staged.append(torch.zeros(ages.count * self.k, width, pin_memory=self.on_gpu))
        self.codec, self.start, self.budgets = codec, start_W, budgets
        self.known = start_W.repeat(self.k, 1)  # this rank's rows as receivers have them [K, W]
        self.encoded = torch.zeros_like(self.known)  # the true rows at their last encoding [K, W]
        # each client's messages and the numbers of its encodings, by age of 0 rounds and more;
        # encoding 0 is the initial row, which every rank has
        self.messages = np.zeros((ages.count, self.k, codec.bytes), np.uint8)
        self.encodings = np.zeros((ages.count, ages.n), np.int64)
        self.latest = Links(2)  # by edge: the encoding that the receiver has, and when it came
        # of every row that some rank stores: rank * N * SPAN + key, a key as in `_keys`
        self._rank_keys = NO_KEYS

    def begin(self) -> None:
        super().begin()
        self.messages[1:] = self.messages[:-1].copy()
        self.encodings[1:] = self.encodings[:-1].copy()

    def leaving(self, w_KW: Tensor, active: np.ndarray, in_rounds: bool) -> Tensor:
        """Return this rank's rows as receivers will have them, `[K, W]`. Collective.

        They are encoded anew if any of them changed. After the rounds all rows are sent whole.
        """
        if not in_rounds:
            self.encodings[0] += 2  # no receiver has the one before, so all get the row whole
            return w_KW
        changed = not self.same(w_KW, self.encoded, active)
        if self.placement.world.agree(changed):  # on any rank
            self.encoded.copy_(w_KW.detach())
            self.encodings[0] += active
            with torch.no_grad():
                for i in np.flatnonzero(active[self.placement.ids]):
                    # this also moves `known`, as receivers move their rows when they decode
                    self.messages[0, i] = self.codec.encode(w_KW[i].detach(), self.known[i])
        return self.known

    def count_bytes(self, to: np.ndarray, of: np.ndarray, in_rounds: bool) -> np.ndarray:
        """Return the bytes of all messages that receivers lack, `[E]`; note that they have them."""
        if not in_rounds:
            return super().count_bytes(to, of, in_rounds)
        edges, newest = to * self.placement.n + of, self.encodings[0, of]
        missed = np.maximum(newest - self.latest.get(edges, 0), 1)
        self.latest.set(edges, newest, self.latest.table[:, -1].max(initial=0) + 1)
        self.latest.trim(self.budgets)
        return np.minimum(missed * self.codec.bytes, self.row_bytes)  # or the row, if it is less

    def split(self, graph: CollaborationGraph) -> tuple[list[CollaborationGraph], np.ndarray]:
        """Return the edges for whole rows, those for messages, and what `_rank_keys` becomes."""
        n, to, owner = graph.n, graph.receivers(), self.placement.owner
        needed = self._keys(self.ages.numbers(to, graph.senders))
        keys = owner[to] * n * SPAN + needed  # with the receiver's rank, one per edge
        lacks = ~np.isin(keys, self._rank_keys)
        # a message suffices if the rank has the encoding before, or gets it now; it has encoding 0
        has_previous = np.isin(keys - 1, np.concatenate([self._rank_keys, keys]))
        suffices = has_previous | (keys % SPAN == 1)
        # a rank keeps the rows of senders from which its clients have or get one, unless they are
        # older than --staleness allows
        stored = np.union1d(self._rank_keys, keys)
        pairs = stored // SPAN  # rank * N + sender
        edges = self.latest.table[:, 0]  # receiver * N + sender
        wanted = np.concatenate([keys // SPAN, owner[edges // n] * n + edges % n])
        stays = np.isin(pairs, wanted) & (stored % SPAN >= self.encodings[-1, pairs % n])
        return [graph.only(lacks & ~suffices), graph.only(lacks & suffices)], stored[stays]

    def pack(self, window: int) -> None:
        if window == 0:
            super().pack(window)
            return
        staged, size = self.staged[1].numpy().view(np.uint8), self.codec.bytes
        staged[:, :size] = self.messages.reshape(len(staged), size)

    def unpack(self, window: int, route: Route, inbox: Inbox) -> None:
        if window == 0:
            self._store |= self._rows_in(inbox, route)
            return
        keys = self._keys(route.arriving).tolist()
        # The oldest rows have the largest numbers, so they come last. They are decoded first: a
        # message changes the encoding before it. Encoding 1 changes the initial row.
        for slot in reversed(range(len(keys))):
            key = keys[slot]
            row = (self.start if key % SPAN == 1 else self._store[key - 1]).clone()
            self.codec.decode(inbox.take(slot).view(np.uint8)[: self.codec.bytes], row)
            self._store[key] = row

    def keep(self, keys: np.ndarray) -> None:
        self._rank_keys = keys
        local = set((keys - self.placement.world.rank * self.placement.n * SPAN).tolist())
        self._store = {key: row for key, row in self._store.items() if key in local}

    def _keys(self, numbers: np.ndarray) -> np.ndarray:
        """Return the keys of rows with these numbers: client * SPAN + encoding."""
        return numbers % self.placement.n * SPAN + self.encodings.ravel()[numbers]

    def state(self) -> tuple[dict[str, Tensor | np.ndarray], dict[str, np.ndarray]]:
        local, shared = super().state()
        local |= {"known": self.known, "told": self.encoded}
        local["messages"] = self.messages.swapaxes(0, 1)
        return local, shared | {"version": self.encodings}
