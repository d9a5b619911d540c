"""A traced module as the structures of net.h, with a place in the arena for each value."""

from collections import Counter, defaultdict
from ctypes import addressof, c_int32
from dataclasses import dataclass
from typing import Any

from dpfl_mpi.numerics.lanes.declared import KINDS, STRUCTURES
from dpfl_mpi.numerics.lanes.trace import Geometry, Op, Slot, Unknown, Use, View, move, whole

ADDING = ("join", "product")  # kinds whose way back only adds to gradients
SAMPLES = {"uint8": 0, "float32": 1, "int32": 2}
CValue, CLayer, CNet = (STRUCTURES[name] for name in ("Value", "Layer", "Net"))


@dataclass
class Plan:
    """The structures of a network: `net`, and what it points to."""

    net: Any  # CNet
    values: Any
    layers: Any
    tables: list[Any]
    pieces: list[tuple[int, int]]  # of the arena: where each starts, and its vectors
    features: dict[int, int]  # what a dense layer reads, by the column where its weight starts
    vocabulary: int  # tokens must be below; 0: there are none, or they may be any


def with_stages(ops: list[Op], logits: Slot) -> list[Op]:
    """Return the ops with each 5x5 convolution, 2x2 pool and ReLU (in any order) as one."""
    readers: dict[Slot, list[Op]] = defaultdict(list)
    for op in ops:
        for use in op.uses:
            readers[use.view.slot].append(op)

    def after(op: Op, kind: str) -> Op | None:
        """Return the op of a kind that alone reads all that this one makes."""
        only = readers[op.out]
        if len(only) != 1 or op.out is logits or only[0].kind != kind:
            return None
        use = only[0].uses[0]
        return only[0] if use.view.whole and use.geometry == op.out.geometry else None

    done: set[Op] = set()
    out = []
    for op in ops:
        if op in done:
            continue
        first = after(op, "max_pool") or after(op, "relu")
        second = after(first, "relu" if first.kind == "max_pool" else "max_pool") if first else None
        if op.kind == "conv" and op.in_stage and first and second:
            pool = first if first.kind == "max_pool" else second
            if pool.in_stage:
                second.out.geometry = pool.out.geometry
                filters, channels = pool.out.geometry[0], op.uses[0].view.slot.geometry[0]
                op = Op(
                    "stage", op.uses, second.out, weight=op.weight, bias=op.bias,
                    space=2 * pool.out.size, own=4 * filters,
                    scratch=filters * (28 * channels + 1) + 4 * pool.out.size,
                )  # fmt: skip
                done |= {first, second}
        out.append(op)
    return out


class Arena:
    """Gives each value its place, in vectors: some share one, some have zeros around them."""

    gap = 0  # vectors between two places, which no layer may touch: the sanitizers' tests use some

    def __init__(self, ops: list[Op], logits: View, classes: int):
        self.last = Use(logits, (1, 1, classes))
        if not logits.whole or all(op.out is not logits.slot for op in ops):
            ops = [*ops, move(logits, (1, 1, classes))]
            self.last = Use(whole(ops[-1].out), (1, 1, classes))
        uses = [self.last, *(use for op in ops for use in op.uses)]
        # what is read in another geometry or order has no zeros around it
        self.plain = {
            use.view.slot
            for use in uses
            if use.geometry != use.view.slot.geometry or not use.view.whole
        }
        self.margins: dict[Slot, tuple[int, int]] = defaultdict(lambda: (0, 0))
        self.ops = self.with_copies(ops)
        self.makers = {op.out: op for op in self.ops}
        uses = [self.last, *(use for op in self.ops for use in op.uses)]
        self.readers = Counter(use.view.slot for use in uses)
        for op in [*self.ops, *reversed(self.ops)]:  # along a chain both ways
            slot = op.uses[0].view.slot
            if self.may_share(op) and not {slot, op.out} & self.plain:
                self.widen(slot, self.margins[op.out])
                self.widen(op.out, self.margins[slot])
        self.end = 0
        self.pieces: list[tuple[int, int]] = []
        self.values: list[Any] = []
        self.numbers: dict[tuple[Slot, Geometry], int] = {}

    def with_copies(self, ops: list[Op]) -> list[Op]:
        """Copy what an op wants in one piece and lies apart, or wants zeros around and has none."""
        out = []
        for op in ops:
            for i, use in enumerate(op.uses):
                apart = use.geometry and not use.view.whole
                if apart or (any(use.margin) and use.view.slot in self.plain):
                    assert use.geometry is not None
                    out.append(move(use.view, use.geometry))
                    op.uses[i] = Use(whole(out[-1].out), use.geometry, use.margin)
                self.widen(op.uses[i].view.slot, use.margin)
            out.append(op)
            if any(op.margin) and op.out in self.plain:
                inner = Slot(op.out.geometry, op.out.upstream)
                copy = move(whole(inner), op.out.geometry)
                copy.out, op.out = op.out, inner
                out.append(copy)
            self.widen(op.out, op.margin)
        return out

    def widen(self, slot: Slot, margin: tuple[int, int]) -> None:
        y, x = self.margins[slot]
        self.margins[slot] = max(y, margin[0]), max(x, margin[1])

    def may_share(self, op: Op) -> bool:
        """Return whether an op's output may have the place of its first input's gradient."""
        view = op.uses[0].view
        # an input that no parameter is upstream of has no gradient
        placed = view.slot in self.makers and (view.slot.upstream > 0 or op.out.upstream == 0)
        return op.in_place and view.whole and self.readers[view.slot] == 1 and placed

    def take(self, vectors: int) -> int:
        """Return where so many vectors of the arena start."""
        start = self.end
        self.end += vectors + self.gap
        self.pieces.append((start, vectors))
        return start

    def place(self, slot: Slot, op: Op | None = None) -> int:
        """Give the output of an op its place; return its value's number."""
        key = slot, slot.geometry
        if key in self.numbers:  # parts side by side are one slot
            return self.numbers[key]
        (planes, lines, units), (top, left) = slot.geometry, self.margins[slot]
        line = units + 2 * left
        plane = (lines + 2 * top) * line
        first = top * line + left
        shape = {"planes": planes, "lines": lines, "units": units, "plane": plane, "line": line}
        value = CValue(**shape, upstream=slot.upstream, d=-1)
        other = None
        overwrites = False
        if op and self.may_share(op):
            source = op.uses[0].view.slot
            if self.margins[source] == (top, left):
                other = self.values[self.numbers[source, source.geometry]]
                overwrites = op.overwrites and not self.makers[source].keeps
        value.x = other.x if other and overwrites else self.take(planes * plane) + first
        if slot.upstream:
            value.d = other.d if other else self.take(planes * plane) + first
        return self.append(key, value)

    def append(self, key: tuple[Slot, Geometry], value: Any) -> int:
        self.numbers[key] = len(self.values)
        self.values.append(value)
        return self.numbers[key]

    def part(self, number: int, geometry: Geometry, plane: int, unit: int) -> int:
        """Return the number of a new value: part of another one, from a plane and unit on."""
        of = self.values[number]
        start = plane * of.plane + unit
        self.values.append(
            CValue(of.x + start, of.d + start, of.upstream, *geometry, of.plane, of.line)
        )
        return len(self.values) - 1

    def number(self, use: Use) -> int:
        """Return the number of the value that an op reads: a slot's, or its in another geometry."""
        slot, geometry = use.view.slot, use.geometry or use.view.slot.geometry
        if (slot, geometry) in self.numbers:
            return self.numbers[slot, geometry]
        of = self.values[self.numbers[slot, slot.geometry]]
        steps = geometry[1] * geometry[2], geometry[2]
        return self.append((slot, geometry), CValue(of.x, of.d, of.upstream, *geometry, *steps))


def adding(ops: list[Op]) -> list[Op]:
    """Mark each use whose gradient is added to what later layers wrote, and clear what they add to.

    A gradient that no layer writes as a whole is set to 0 first.
    """
    written: set[Slot] = set()
    out: list[Op] = []
    for op in reversed(ops):
        cleared = []
        for i, use in enumerate(op.uses):
            slot = use.view.slot
            if not slot.upstream:
                continue
            if slot not in written and (op.kind in ADDING or not use.view.whole):
                cleared.append(Op("clear", [Use(whole(slot))], slot))
                written.add(slot)
            op.adds |= (slot in written) << i
            written.add(slot)
        out += [*cleared, op]
    return out[::-1]


def plan(
    ops: list[Op], logits: View, sample: Slot, shape: tuple[int, ...], dtype: str, classes: int
) -> Plan:
    """Return the structures of what `trace` returned for samples of a shape and dtype."""
    arena = Arena(with_stages(ops, logits.slot), logits, classes)
    arena.place(sample)
    if len(shape) == 3:
        h, w, c = shape
    elif dtype == "int32":
        h, w, c = 1, shape[0], 1
    else:
        h, w, c = 1, 1, shape[0]
    if len(shape) == 1:
        arena.values[0].plane = 1  # a vector is read as one pixel of F channels
    layers, tables, features, vocabulary = [], [], {}, 0
    scratch, own = 0, 2 * ((w * c + 3) // 4)
    for op in adding(arena.ops):
        inputs = [arena.number(use) for use in op.uses]
        out = arena.place(op.out, op)
        if op.part:
            out = arena.part(out, *op.part)
        size, table = op.size, op.table
        try:
            if op.fill:
                size, table = op.fill(*(arena.values[i] for i in [*inputs, out]))
        except Exception as error:
            what = f"{op.kind} of these sizes ({type(error).__name__}){op.place}"
            raise Unknown(what) from error
        layer = CLayer(KINDS.index(op.kind), inputs[0], inputs[-1], out, op.adds)
        layer.size[: len(size)] = size
        layer.number[: len(op.numbers)] = op.numbers
        layer.weight, layer.bias, layer.space = op.weight, op.bias, arena.take(op.space)
        tables.append((c_int32 * max(1, len(table)))(*table))
        layer.table = addressof(tables[-1])
        layers.append(layer)
        scratch, own = max(scratch, op.scratch), max(own, op.own)
        if op.kind == "embed" and op.uses[0].view.slot is sample:
            vocabulary = min(vocabulary or size[0], size[0])
        if op.kind == "dense":
            features[op.weight] = inputs[0]
    last = arena.number(arena.last)
    start = arena.take(scratch)
    values, all_layers = (
        (kind * len(parts))(*parts) for kind, parts in ((CValue, arena.values), (CLayer, layers))
    )
    net = CNet(len(layers), SAMPLES[dtype], h, w, c, last, values, all_layers)
    net.vectors, net.scratch, net.own = arena.end, start, own
    return Plan(net, values, all_layers, tables, arena.pieces, features, vocabulary)
