"""A traced module as the structures of net.h: which layers are one, where in the arena each value lies, and what adds to which gradient."""

import math
from collections import Counter, defaultdict
from ctypes import addressof, c_int32
from dataclasses import dataclass, replace
from typing import Any

from dpfl_mpi.numerics.lanes.declared import KINDS, STRUCTURES
from dpfl_mpi.numerics.lanes.trace import Geometry, Op, Slot, Unknown, Use, View, move

ADD = ("join", "product")  # their way back adds to gradients, and writes none
SAMPLES = {"uint8": 0, "float32": 1, "int32": 2}
CValue, CLayer, CNet = (STRUCTURES[name] for name in ("Value", "Layer", "Net"))


@dataclass
class Plan:
    """The structures of a network: `net`, and what they point to."""

    net: Any  # CNet
    values: Any
    layers: Any
    tables: list[Any]
    pieces: list[tuple[int, int]]  # of the arena: where each starts, and its vectors
    features: dict[int, int]  # by the column where a dense layer's weight starts: the value that it reads
    vocabulary: int  # tokens must be below; 0: there are none, or they may be any


def fused(ops: list[Op], logits: Slot) -> list[Op]:
    """Return the ops with what the library does in one: a 5x5 convolution, its 2x2 pool and ReLU; a dense layer or a norm, and its ReLU."""
    readers: dict[Slot, list[Op]] = defaultdict(list)
    for op in ops:
        for use in op.uses:
            readers[use.view.slot].append(op)

    def after(op: Op, kind: str) -> Op | None:
        """The op of a kind that alone reads all that this one makes."""
        only = readers[op.out]
        if len(only) != 1 or op.out is logits or only[0].kind != kind:
            return None
        use = only[0].uses[0]
        return only[0] if use.view.whole and use.geometry == op.out.geometry else None

    gone: set[Op] = set()
    out = []
    for op in ops:
        if op in gone:
            continue
        one = after(op, "relu")
        if op.kind in ("dense", "norm") and one:  # whose last size says so
            op = replace(op, out=one.out, size=[*op.size[:-1], 1], keeps=True)
            gone.add(one)
        first = one or after(op, "max_pool")
        second = after(first, "max_pool" if one else "relu") if first else None
        if op.kind == "conv" and op.facts.get("stage") and first and second:
            pool = second if one else first
            if pool.facts["halves"]:
                area = math.prod(pool.out.geometry)
                second.out.geometry = pool.out.geometry
                space = 2 * area + 4 * pool.out.geometry[0]
                op = Op("stage", op.uses, second.out, weight=op.weight, bias=op.bias, space=space)
                gone |= {first, second}
        out.append(op)
    return out


def whole(slot: Slot) -> View:
    """Return all of a slot as a view."""
    _, lines, units = slot.geometry
    return View(slot, slot.geometry, (lines * units, units, 1), 0, 0)


class Arena:
    """Gives places: which slots share one, which have zeros around them, and where all lie."""

    gap = 0  # vectors between two places: the tests put some there, and see that no layer touches them

    def __init__(self, ops: list[Op], sample: Slot, logits: View, classes: int):
        self.sample = sample
        ops = self.laid_out(ops)
        last = Use(logits, (1, 1, classes))
        if not logits.whole or logits.slot is sample:
            ops.append(move(logits, (1, 1, classes)))
            last = Use(whole(ops[-1].out), (1, 1, classes))
        self.last = last
        self.readers = Counter(use.view.slot for use in [last, *(use for op in ops for use in op.uses)])
        self.makers = {op.out: op for op in ops}
        self.ops = self.padded(ops)
        self.end = 0
        self.pieces: list[tuple[int, int]] = []
        self.values: list[Any] = []
        self.numbers: dict[tuple[Slot, Geometry], int] = {}

    def laid_out(self, ops: list[Op]) -> list[Op]:
        """Bring together what an op wants in one piece and lies apart."""
        out = []
        for op in ops:
            for i, use in enumerate(op.uses):
                if use.geometry and not use.view.whole:
                    out.append(move(use.view, use.geometry))
                    op.uses[i] = Use(whole(out[-1].out), use.geometry, use.margin)
            out.append(op)
        return out

    def shares(self, op: Op) -> bool:
        """Return whether an op's output may have the place of its first input's gradient: an input that no parameter is upstream of has none."""
        view = op.uses[0].view
        placed = view.slot is not self.sample and (view.slot.upstream > 0 or op.out.upstream == 0)
        return op.in_place and view.whole and self.readers[view.slot] == 1 and placed

    def padded(self, ops: list[Op]) -> list[Op]:
        """Decide which slots have zeros around them: where another layer wants them without, a copy has them."""
        group: dict[Slot, Slot] = {}

        def root(slot: Slot) -> Slot:
            while slot in group:
                slot = group[slot]
            return slot

        for op in ops:
            if self.shares(op) and root(op.out) is not root(op.uses[0].view.slot):
                group[root(op.out)] = root(op.uses[0].view.slot)
        plain = {
            root(use.view.slot)
            for use in [self.last, *(use for op in ops for use in op.uses)]
            if use.geometry != use.view.slot.geometry
        }
        self.margins: dict[Slot, tuple[int, int]] = {}
        out = []
        for op in ops:
            for i, use in enumerate(op.uses):
                slot = use.view.slot
                if any(use.margin) and root(slot) in plain:
                    assert use.geometry is not None
                    out.append(move(use.view, use.geometry))
                    op.uses[i] = use = Use(whole(out[-1].out), use.geometry, use.margin)
                    self.readers[use.view.slot] = 1
                self.widen(root(use.view.slot), use.margin)
            out.append(op)
            if any(op.margin) and root(op.out) in plain:
                inner = Slot(op.out.geometry, op.out.upstream)
                copy = move(whole(inner), op.out.geometry)
                copy.out, op.out = op.out, inner
                self.readers[inner] = 1
                out.append(copy)
            self.widen(root(op.out), op.margin)
        self.root = root
        return out

    def widen(self, slot: Slot, margin: tuple[int, int]) -> None:
        y, x = self.margins.get(slot, (0, 0))
        self.margins[slot] = max(y, margin[0]), max(x, margin[1])

    def take(self, vectors: int) -> int:
        """Return where so many vectors of the arena start."""
        start = self.end
        self.end += vectors + self.gap
        self.pieces.append((start, vectors))
        return start

    def place(self, slot: Slot, shared: Slot | None = None, overwrites: bool = False) -> int:
        """Give a slot its place and return its value's number; `shared`: its gradient lies where that slot's does, with `overwrites` its numbers too."""
        if (slot, slot.geometry) in self.numbers:  # parts side by side are one slot
            return self.numbers[slot, slot.geometry]
        (planes, lines, units), (top, left) = slot.geometry, self.margins.get(self.root(slot), (0, 0))
        line = units + 2 * left
        plane = (lines + 2 * top) * line
        first = top * line + left
        value = CValue(planes=planes, lines=lines, units=units, plane=plane, line=line, upstream=slot.upstream, d=-1)
        other = self.values[self.numbers[shared, shared.geometry]] if shared else None
        value.x = other.x if other and overwrites else self.take(planes * plane) + first
        if slot.upstream:
            value.d = other.d if other else self.take(planes * plane) + first
        self.numbers[slot, slot.geometry] = len(self.values)
        self.values.append(value)
        return self.numbers[slot, slot.geometry]

    def part(self, number: int, geometry: Geometry, plane: int, unit: int) -> int:
        """Return the number of a value that is part of another one: its geometry, and the plane and unit where it starts."""
        of = self.values[number]
        start = plane * of.plane + unit
        self.values.append(CValue(of.x + start, of.d + start, of.upstream, *geometry, of.plane, of.line))
        return len(self.values) - 1

    def number(self, use: Use) -> int:
        """Return the number of the value that an op reads: the slot's, or the same memory in another geometry."""
        slot, geometry = use.view.slot, use.geometry or use.view.slot.geometry
        if (slot, geometry) not in self.numbers:
            first = self.values[self.numbers[slot, slot.geometry]]
            _, lines, units = geometry
            self.numbers[slot, geometry] = len(self.values)
            self.values.append(CValue(first.x, first.d, first.upstream, *geometry, lines * units, units))
        return self.numbers[slot, geometry]


def adding(ops: list[Op]) -> list[Op]:
    """Say of each use whether its gradient is added to what later layers wrote, and clear what none of them writes as a whole."""
    touched: set[Slot] = set()
    out: list[Op] = []
    for op in reversed(ops):
        adds = 0
        cleared = []
        for i, use in enumerate(op.uses):
            slot = use.view.slot
            if not slot.upstream:
                continue
            if slot not in touched and (op.kind in ADD or not use.view.whole):
                cleared.append(Op("clear", [Use(whole(slot))], slot, facts={"adds": 0}))
                touched.add(slot)
            adds |= (slot in touched) << i
            touched.add(slot)
        op.facts = op.facts | {"adds": adds}
        out += [*cleared, op]
    return out[::-1]


def plan(ops: list[Op], logits: View, sample: Slot, shape: tuple[int, ...], dtype: str, classes: int) -> Plan:
    """Return the structures of what `trace` returned for samples of a shape and dtype."""
    arena = Arena(fused(ops, logits.slot), sample, logits, classes)
    arena.place(sample)
    h, w, c = shape if len(shape) == 3 else (1, shape[0], 1) if dtype == "int32" else (1, 1, shape[0])
    if len(shape) == 1:
        arena.values[0].plane = 1  # a vector is read as one pixel of F channels
    layers, tables, features, vocabulary = [], [], {}, 0
    scratch = 2 * ((w * c + 3) // 4)
    for op in adding(arena.ops):
        inputs = [arena.number(use) for use in op.uses]
        shared = op.uses[0].view.slot if arena.shares(op) else None
        out = arena.place(op.out, shared, op.overwrites and shared is not None and not arena.makers[shared].keeps)
        if op.part:
            out = arena.part(out, *op.part)
        try:
            size, table = op.fill(*(arena.values[i] for i in [*inputs, out])) if op.fill else (op.size, op.table)
        except Exception as error:
            raise Unknown(f"{op.kind} of these sizes ({type(error).__name__}){op.place}") from error
        layer = CLayer(KINDS.index(op.kind), inputs[0], inputs[-1], out, op.facts["adds"])
        layer.size[: len(size)], layer.number[: len(op.numbers)] = size, op.numbers
        layer.weight, layer.bias, layer.space = op.weight, op.bias, arena.take(op.space)
        tables.append((c_int32 * max(1, len(table)))(*table))
        layer.table = addressof(tables[-1])
        layers.append(layer)
        scratch = max(scratch, op.scratch)
        if op.kind == "embed" and op.uses[0].view.slot is sample:
            vocabulary = min(vocabulary or size[0], size[0])
        if op.kind == "dense":
            features[op.weight] = inputs[0]
    last = arena.number(arena.last)
    start = arena.take(scratch)
    values, all_layers = (CValue * len(arena.values))(*arena.values), (CLayer * len(layers))(*layers)
    net = CNet(len(layers), SAMPLES[dtype], h, w, c, last, last, values, all_layers)
    net.vectors, net.scratch = arena.end, start
    return Plan(net, values, all_layers, tables, arena.pieces, features, vocabulary)
