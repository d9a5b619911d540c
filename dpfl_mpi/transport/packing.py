"""What of a row is put into a window: all of it, some columns (--send), or what a codec encodes."""

import numpy as np
import torch
from torch import Tensor

from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.mpi.window import Inbox, Route
from dpfl_mpi.numerics.ensemble import Ensemble
from dpfl_mpi.transport.codec import Int8, TopK
from dpfl_mpi.transport.links import Ages, Links

SPAN = 2**32  # more than the encodings of a client's row
NO_KEYS = np.zeros(0, np.int64)


class Packing:
    """Rows, by their numbers in `Ages`, are put whole and read where they arrive.

    Or some columns, bool `[W]`, are put, and unpacked there.
    """

    encodes = False

    def __init__(self, ensemble: Ensemble, ages: Ages, columns_W: Tensor | None):
        """Put these columns, None: all."""
        self.ensemble, self.ages, self.placement = ensemble, ages, ages.placement
        self.columns = columns_W
        self.in_place = columns_W is None and not self.encodes
        self.k = len(self.placement.ids)
        # one-sided calls on a GPU's memory crash, or return wrong rows (pmodels/mpich 7619, 7340):
        # MPI sees host memory alone, page-locked where a GPU copies from and to it
        self.on_gpu = ensemble.device.type == "cuda"
        self.landed: Tensor | None = None  # on a GPU, a copy of the rows in the window
        self._sent: slice | Tensor = slice(ensemble.size)
        count = ensemble.size
        if columns_W is not None:
            self._sent = torch.nonzero(columns_W[: ensemble.size])[:, 0]
            count = len(self._sent)
        self.row_bytes = 4 * count  # of a whole row on a network
        self.staged: list[Tensor] = []  # rows in host memory that are put, by window
        self._add_window(ensemble.width if self.in_place else count)
        # the rows that left this rank's clients, of this round and of those before that count
        # still; local receivers read them here: a method may train its rows on before it averages
        self.outgoing = self.staged[0]
        if not self.in_place or self.on_gpu:
            self.outgoing = ensemble.zeros(ages.count * self.k)
        self.own = self.outgoing[: self.k]  # of receivers, where not all columns are sent
        self._store: dict[int, Tensor] = {}  # unpacked rows of other ranks by key

    def _add_window(self, width: int) -> None:
        rows = self.ages.count * self.k
        self.staged.append(torch.zeros(rows, width, pin_memory=self.on_gpu))

    def begin(self) -> None:
        """Start a round: what left in the last one is a round older."""
        if self.ages.count > 1 and self.k:
            self.outgoing[self.k :] = self.outgoing[: -self.k].clone()

    def leaving(self, w_KW: Tensor, active: np.ndarray, in_rounds: bool) -> Tensor:
        """Return what others will know of this rank's rows, `[K, W]`. Collective."""
        return w_KW

    def same(self, a_KW: Tensor, b_KW: Tensor, active: np.ndarray) -> bool:
        """Return whether this rank's active clients, bool `[N]`, have the same rows in both."""
        rows = np.flatnonzero(active[self.placement.ids])
        return torch.equal(a_KW[rows], b_KW[rows])

    def sizes(self, to: np.ndarray, of: np.ndarray, in_rounds: bool) -> np.ndarray:
        """Return the bytes that go along edges `[E]` on a network."""
        return np.full(len(of), self.row_bytes)

    def complete(self, rows_kW: Tensor, own_kW: Tensor) -> Tensor:
        """Return rows that arrived, with the receivers' own columns where nothing is sent."""
        return rows_kW if self.columns is None else torch.where(self.columns, rows_kW, own_kW)

    def split(self, graph: CollaborationGraph) -> tuple[list[CollaborationGraph], np.ndarray]:
        """Return the part of a graph that goes through each window, and what ranks store then."""
        return [graph], NO_KEYS

    def pack(self, window: int) -> None:
        """Stage what is put through a window."""
        if self.outgoing is not self.staged[0]:
            self.staged[0].copy_(self.outgoing if self.in_place else self.outgoing[:, self._sent])

    def unpack(self, window: int, route: Route, inbox: Inbox) -> None:
        """Store the rows that arrived in a window, unless they are read in place."""
        self.landed = None  # its memory is the next one's
        if not self.in_place:
            self._store = self._take(route, inbox)
        elif self.on_gpu:
            self.landed = self._arrived(inbox, len(route.arriving))

    def _arrived(self, inbox: Inbox, count: int) -> Tensor:
        """Return so many rows of the first window on the device: on a CPU a view, not a copy."""
        view, staged = inbox.view[:count], self.staged[0]
        if not self.on_gpu:
            return torch.from_numpy(view)
        rows = torch.empty(view.shape, device=self.ensemble.device)
        # through the memory of rows that have left: they are staged anew before the next Put
        for start in range(0, count, len(staged)):
            part = staged[: count - start]
            part.numpy()[:] = view[start : start + len(part)]
            rows[start : start + len(part)].copy_(part)  # waits, as `part` is used again
        return rows

    def _take(self, route: Route, inbox: Inbox) -> dict[int, Tensor]:
        """Return the rows in a window by key."""
        rows, keys = {}, self._keys(route.arriving).tolist()
        for key, arrived in zip(keys, self._arrived(inbox, len(keys)), strict=True):
            rows[key] = self.ensemble.zeros(1)[0]
            rows[key][self._sent] = arrived
        return rows

    def unpacked(self, numbers: np.ndarray) -> dict[int, Tensor] | None:
        """Return unpacked rows of other ranks by number; None if they are read in place."""
        if self.in_place:
            return None
        keys = self._keys(numbers).tolist()
        return {j: self._store[key] for j, key in zip(numbers.tolist(), keys, strict=True)}

    def keep(self, keys: np.ndarray) -> None:
        """Forget stored rows beside these keys of all ranks."""

    def _keys(self, numbers: np.ndarray) -> np.ndarray:
        """Return the keys of rows in the store."""
        return numbers

    def state(self) -> tuple[dict[str, Tensor | np.ndarray], dict[str, np.ndarray]]:
        """Return what a checkpoint stores: of this rank's clients `[K, ...]`, and of all ranks."""
        if self.ages.count == 1:
            return {}, {}
        rows = self.outgoing.view(self.ages.count, self.k, self.ensemble.width)
        return {"versions": rows.transpose(0, 1)}, {}


class Encoded(Packing):
    """What a codec makes of a row's change is put through a second window.

    A rank that lacks the row before gets the new one whole, through the first window.
    """

    encodes = True

    def __init__(self, codec: Int8 | TopK, ages: Ages, start_W: Tensor, budgets: np.ndarray):
        """Encode from the common initial row; a client stores `budgets` `[N]` rows of others."""
        super().__init__(codec.ensemble, ages, codec.columns_W)
        self._add_window(-(-codec.bytes // 4))
        self.codec, self.start, self.budgets = codec, start_W, budgets
        self.known = start_W.repeat(self.k, 1)  # what others know of this rank's clients [K, W]
        self.encoded = torch.zeros_like(self.known)  # the rows that were encoded last
        # of this round and of those before that count still: messages, and the number of each
        # client's encoding; 0 is the initial row, which everyone knows
        self.messages = np.zeros((ages.count, self.k, codec.bytes), np.uint8)
        self.encodings = np.zeros((ages.count, ages.n), np.int64)
        self.latest = Links(2)  # by edge which encoding the receiver has, and when it arrived
        self._rank_keys = NO_KEYS  # rank * N * SPAN + key of all that ranks store

    def begin(self) -> None:
        super().begin()
        self.messages[1:] = self.messages[:-1].copy()
        self.encodings[1:] = self.encodings[:-1].copy()

    def leaving(self, w_KW: Tensor, active: np.ndarray, in_rounds: bool) -> Tensor:
        """Return this rank's rows as receivers will have them, `[K, W]`. Collective.

        A row that changed is encoded once, as its difference to what receivers have. After the
        rounds all rows are sent whole.
        """
        if not in_rounds:
            self.encodings[0] += 2  # no receiver has the one before, so all get the row whole
            return w_KW
        changed = not self.same(w_KW, self.encoded, active)
        if self.placement.world.agree(changed):
            self.encoded.copy_(w_KW.detach())
            self.encodings[0] += active
            with torch.no_grad():
                for i in np.flatnonzero(active[self.placement.ids]):
                    # `known` is updated, too, as receivers do when they decode
                    self.messages[0, i] = self.codec.encode(w_KW[i].detach(), self.known[i])
        return self.known

    def sizes(self, to: np.ndarray, of: np.ndarray, in_rounds: bool) -> np.ndarray:
        """Return the bytes that go along edges `[E]`: all encodings that a receiver missed."""
        if not in_rounds:
            return super().sizes(to, of, in_rounds)
        edges, newest = to * self.placement.n + of, self.encodings[0, of]
        missed = np.maximum(newest - self.latest.get(edges, 0), 1)
        self.latest.set(edges, newest, self.latest.table[:, 2].max(initial=0) + 1)
        self.latest.trim(self.budgets)
        return np.minimum(missed * self.codec.bytes, self.row_bytes)

    def split(self, graph: CollaborationGraph) -> tuple[list[CollaborationGraph], np.ndarray]:
        """Return which edges need whole rows and which encoded ones, and what ranks store then.

        A rank stores the rows that may still be taken, of senders that its clients have or get.
        """
        n, to, owner = graph.n, graph.receivers(), self.placement.owner
        latest = self.latest.table
        numbers = self.ages.numbers(to, graph.senders)
        keys = owner[to] * n * SPAN + self._keys(numbers)
        lacks = ~np.isin(keys, self._rank_keys)
        has_previous = np.isin(keys - 1, np.concatenate([self._rank_keys, keys]))
        follows = has_previous | (keys % SPAN == 1)  # the initial row is everywhere
        stored = np.union1d(self._rank_keys, keys)
        pairs = stored // SPAN
        wanted = np.concatenate([keys // SPAN, owner[latest[:, 0] // n] * n + latest[:, 0] % n])
        stays = np.isin(pairs, wanted) & (stored % SPAN >= self.encodings[-1, pairs % n])
        return [graph.only(lacks & ~follows), graph.only(lacks & follows)], stored[stays]

    def pack(self, window: int) -> None:
        if window == 0:
            super().pack(window)
            return
        size = self.codec.bytes
        staged = self.staged[1]
        staged.numpy().view(np.uint8)[:, :size] = self.messages.reshape(len(staged), size)

    def unpack(self, window: int, route: Route, inbox: Inbox) -> None:
        if window == 0:
            self._store |= self._take(route, inbox)
            return
        keys = self._keys(route.arriving).tolist()
        for slot in reversed(range(len(keys))):  # older rows first
            key = keys[slot]
            row = (self.start if key % SPAN == 1 else self._store[key - 1]).clone()
            self.codec.decode(inbox.take(slot).view(np.uint8)[: self.codec.bytes], row)
            self._store[key] = row

    def keep(self, keys: np.ndarray) -> None:
        self._rank_keys = keys
        local = set((keys - self.placement.world.rank * self.placement.n * SPAN).tolist())
        self._store = {key: row for key, row in self._store.items() if key in local}

    def _keys(self, numbers: np.ndarray) -> np.ndarray:
        """Return the keys of rows in the store: client * SPAN + encoding."""
        return numbers % self.placement.n * SPAN + self.encodings.ravel()[numbers]

    def state(self) -> tuple[dict[str, Tensor | np.ndarray], dict[str, np.ndarray]]:
        local, shared = super().state()
        local |= {"known": self.known, "told": self.encoded}
        local["messages"] = self.messages.swapaxes(0, 1)
        return local, shared | {"version": self.encodings}
