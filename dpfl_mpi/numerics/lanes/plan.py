"""Turn the ops of a traced module (`trace.py`) into the structures that the kernels in C read.

The arena is the memory for a client's training pass, counted in vectors, which have the same number
of each of several samples. A `Value` of net.h says where in it the output of an op and its gradient
lie; a `Layer` is an op, and a `Net` is all of both. `kernels.describe` calls `plan`.
"""

from collections import Counter, defaultdict
from ctypes import addressof, c_int32
from dataclasses import dataclass
from typing import Any

from dpfl_mpi.numerics.lanes.declared import KINDS, STRUCTURES
from dpfl_mpi.numerics.lanes.trace import Geometry, Op, Slot, Unsupported, Use, View, move, whole

ADDING = ("join", "product")  # kinds whose way back only adds to gradients
SAMPLE_TYPES = {"uint8": 0, "float32": 1, "int32": 2}  # BYTES, FLOATS, TOKENS of net.h
CValue, CLayer, CNet = (STRUCTURES[name] for name in ("Value", "Layer", "Net"))


@dataclass
class Plan:
    """A network as `net`, a structure of C, and the arrays that it points to."""

    net: Any  # CNet
    values: Any  # an array of CValue
    layers: Any  # an array of CLayer
    tables: list[Any]  # an array of int32 for each layer
    pieces: list[tuple[int, int]]  # of the arena: where each starts, and its vectors
    features: dict[int, int]  # the value that a dense layer reads, by its weight's first column
    vocabulary: int  # tokens must be below; 0: there are none, or they may be any


def with_stages(ops: list[Op], logits: Slot) -> list[Op]:
    """Return the ops with a convolution of 5x5, 2x2 pool and ReLU (in any order) as one stage."""
    readers: dict[Slot, list[Op]] = defaultdict(list)
    for op in ops:
        for use in op.uses:
            readers[use.view.slot].append(op)

    def next_op(op: Op, kind: str) -> Op | None:
        """Return the op of this kind that reads the whole output of `op`, if no other op does."""
        readers_of_op = readers[op.out]
        if len(readers_of_op) != 1 or op.out is logits or readers_of_op[0].kind != kind:
            return None
        use = readers_of_op[0].uses[0]
        return readers_of_op[0] if use.view.whole and use.geometry == op.out.geometry else None

    fused: set[Op] = set()  # ops that are now part of a stage
    out = []
    for op in ops:
        if op in fused:
            continue
        pool, relu = next_op(op, "max_pool"), next_op(op, "relu")
        if pool:
            relu = next_op(pool, "relu")
        elif relu:
            pool = next_op(relu, "max_pool")
        if op.kind == "conv" and op.in_stage and pool and relu and pool.in_stage:
            last = max(pool, relu, key=ops.index)
            last.out.geometry = pool.out.geometry
            assert op.uses[0].geometry is not None  # the layer's, which its slot may not have
            filters, channels = pool.out.geometry[0], op.uses[0].geometry[0]
            op = Op(
                "stage", op.uses, last.out, weight=op.weight, bias=op.bias,
                space=2 * pool.out.size, thread_scratch=4 * filters,
                scratch=filters * (28 * channels + 1) + 4 * pool.out.size,
            )  # fmt: skip
            fused |= {pool, relu}
        out.append(op)
    return out


class Arena:
    """Decides where in the arena each value and its gradient lie.

    Some have a margin: zeros around them, as the padding of a convolution. Some share a place with
    a value that nobody reads any more.
    """

    gap = 0  # vectors between two places, which no layer may touch: the sanitizers' tests use some

    def __init__(self, ops: list[Op], logits: View, classes: int):
        # the logits must be one number after the other
        self.logits = Use(logits, (1, 1, classes))
        if not logits.whole or all(op.out is not logits.slot for op in ops):
            ops = [*ops, move(logits, (1, 1, classes))]
            self.logits = Use(whole(ops[-1].out), (1, 1, classes))
        # what is read in another geometry or order cannot have zeros around it
        self.without_margin = set()
        for use in (self.logits, *(use for op in ops for use in op.uses)):
            if use.geometry != use.view.slot.geometry or not use.view.whole:
                self.without_margin.add(use.view.slot)
        self.margins: dict[Slot, tuple[int, int]] = defaultdict(lambda: (0, 0))
        self.ops = self.with_copies(ops)
        self.makers = {op.out: op for op in self.ops}
        uses = [self.logits, *(use for op in self.ops for use in op.uses)]
        self.readers = Counter(use.view.slot for use in uses)  # how many read each slot
        # values that share a place need equal margins: pass them on along chains, both ways
        for op in [*self.ops, *reversed(self.ops)]:
            source = op.uses[0].view.slot
            if self.may_share(op) and not {source, op.out} & self.without_margin:
                self.widen(source, self.margins[op.out])
                self.widen(op.out, self.margins[source])
        self.end = 0  # vectors that are taken so far
        self.pieces: list[tuple[int, int]] = []
        self.values: list[Any] = []  # each a CValue
        # the number of a value in `values`, by its slot and the geometry in which it is read
        self.numbers: dict[Any, int] = {}

    def with_copies(self, ops: list[Op]) -> list[Op]:
        """Return the ops, and copies where an op cannot read or write a slot as it is.

        It cannot read a view with gaps as planes, nor use a margin where the slot can have none.
        """
        out = []
        for op in ops:
            for i, use in enumerate(op.uses):
                has_gaps = use.geometry and not use.view.whole
                if has_gaps or (any(use.margin) and use.view.slot in self.without_margin):
                    assert use.geometry is not None
                    out.append(move(use.view, use.geometry))
                    op.uses[i] = Use(whole(out[-1].out), use.geometry, use.margin)
                self.widen(op.uses[i].view.slot, use.margin)
            out.append(op)
            if any(op.margin) and op.out in self.without_margin:  # write elsewhere, then copy
                inner = Slot(op.out.geometry, op.out.upstream)
                copy = move(whole(inner), op.out.geometry)
                copy.out, op.out = op.out, inner
                out.append(copy)
            self.widen(op.out, op.margin)
        return out

    def widen(self, slot: Slot, margin: tuple[int, int]) -> None:
        """Give a slot margins of at least this size."""
        y, x = self.margins[slot]
        self.margins[slot] = max(y, margin[0]), max(x, margin[1])

    def may_share(self, op: Op) -> bool:
        """Return whether an op's output may have the place of its first input's gradient."""
        view = op.uses[0].view
        # an input that no parameter is upstream of has no gradient
        placed = view.slot in self.makers and (view.slot.upstream > 0 or op.out.upstream == 0)
        return op.in_place and view.whole and self.readers[view.slot] == 1 and placed

    def take(self, vectors: int) -> int:
        """Return where so many new vectors of the arena start."""
        start = self.end
        self.end += vectors + self.gap
        self.pieces.append((start, vectors))
        return start

    def place(self, slot: Slot, op: Op | None = None) -> int:
        """Give the output of an op its place; return its value's number."""
        key = slot, slot.geometry
        if key in self.numbers:  # several ops write parts of one slot
            return self.numbers[key]
        (planes, lines, units), (top, left) = slot.geometry, self.margins[slot]
        line = units + 2 * left
        plane = (lines + 2 * top) * line
        first = top * line + left  # the first number, after the zeros before it
        value = CValue(-1, -1, slot.upstream, planes, lines, units, plane, line)
        source = None  # the value whose place is taken over
        replaces = False  # not only the gradient's place: the source itself is not read again
        if op and self.may_share(op):
            source_slot = op.uses[0].view.slot
            if self.margins[source_slot] == (top, left):
                source = self.values[self.numbers[source_slot, source_slot.geometry]]
                replaces = op.overwrites and not self.makers[source_slot].keeps
        value.start = source.start if source and replaces else self.take(planes * plane) + first
        if slot.upstream and source:
            value.gradient_start = source.gradient_start
        elif slot.upstream:
            value.gradient_start = self.take(planes * plane) + first
        return self.append(value, key)

    def append(self, value: Any, key: Any = None) -> int:
        """Return the number of a new value; `numbers` holds it by its key."""
        self.numbers[key] = len(self.values)
        self.values.append(value)
        return self.numbers[key]

    def part(self, number: int, geometry: Geometry, plane: int, unit: int) -> int:
        """Return the number of a new value: part of another one, from a plane and unit on."""
        value = self.values[number]
        first = plane * value.plane_step + unit
        starts = value.start + first, value.gradient_start + first
        steps = value.plane_step, value.line_step
        return self.append(CValue(*starts, value.upstream, *geometry, *steps))

    def value_read_by(self, use: Use) -> int:
        """Return the number of the value that an op reads: the slot, in the op's own geometry.

        A geometry other than the slot's own is of a slot without a margin (`without_margin`).
        """
        slot, geometry = use.view.slot, use.geometry or use.view.slot.geometry
        if (slot, geometry) in self.numbers:
            return self.numbers[slot, geometry]
        own = self.values[self.numbers[slot, slot.geometry]]
        plane, line = geometry[1] * geometry[2], geometry[2]
        starts = own.start, own.gradient_start
        value = CValue(*starts, own.upstream, *geometry, plane, line)
        return self.append(value, (slot, geometry))


def adding(ops: list[Op]) -> list[Op]:
    """Return the ops, and set their `adds`: to which inputs' gradients they add.

    On the way back, the last op first, the first reader of a slot writes its gradient and others
    add to it. A gradient that no op writes as a whole is first set to 0 by an op "clear".
    """
    written: set[Slot] = set()
    out: list[Op] = []  # the last op first
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
    """Return the plan of what `trace` returned for samples of a shape and dtype."""
    arena = Arena(with_stages(ops, logits.slot), logits, classes)
    arena.place(sample)
    if len(shape) == 3:
        h, w, c = shape
    else:  # tokens are a line, and a vector is one pixel of F channels
        h, w, c = (1, shape[0], 1) if dtype == "int32" else (1, 1, shape[0])
        arena.values[0].plane_step = 1
    layers, tables, features, vocabulary = [], [], {}, 0
    # layers run one after the other: they need as many vectors as the one that needs most
    scratch, thread_scratch = 0, 2 * ((w * c + 3) // 4)
    for op in adding(arena.ops):
        inputs = [arena.value_read_by(use) for use in op.uses]
        out = arena.place(op.out, op)
        if op.part:
            out = arena.part(out, *op.part)
        size, table = op.size, op.table
        try:
            if op.fill:
                size, table = op.fill(*(arena.values[i] for i in [*inputs, out]))
        except Exception as error:
            what = f"{op.kind} of these sizes ({type(error).__name__}){op.location}"
            raise Unsupported(what) from error
        # the op as a structure of C
        layer = CLayer(KINDS.index(op.kind), inputs[0], inputs[-1], out, op.adds)
        layer.size[: len(size)] = size
        layer.number[: len(op.numbers)] = op.numbers
        layer.weight, layer.bias, layer.space = op.weight, op.bias, arena.take(op.space)
        tables.append((c_int32 * max(1, len(table)))(*table))
        layer.table = addressof(tables[-1])
        layers.append(layer)
        scratch = max(scratch, op.scratch)
        thread_scratch = max(thread_scratch, op.thread_scratch)
        if op.kind == "embed" and op.uses[0].view.slot is sample:
            vocabulary = min(vocabulary or size[0], size[0])
        if op.kind == "dense":
            features[op.weight] = inputs[0]
    logits_number, scratch_start = arena.value_read_by(arena.logits), arena.take(scratch)
    c_values = (CValue * len(arena.values))(*arena.values)
    c_layers = (CLayer * len(layers))(*layers)
    net = CNet(len(layers), SAMPLE_TYPES[dtype], h, w, c, logits_number, c_values, c_layers)
    net.vectors, net.scratch, net.private_vectors = arena.end, scratch_start, thread_scratch
    return Plan(net, c_values, c_layers, tables, arena.pieces, features, vocabulary)
