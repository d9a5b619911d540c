"""Record a module's forward as a list of `Op`, from one run on samples of zeros.

A call that only looks at numbers from another side (view, permute, chunk, ...) needs no layer: its
result lies in the memory of its input, and its strides say where. Every other call must be one that
`layers` or `joins` handles.

Axes: S samples.
"""

import copy
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from dpfl_mpi.numerics.dropout import Draws, KeyedDropout, keyed

S = 3  # samples of the trial: an axis of this size and of a sample's stride becomes the lanes
MOST_AXES = 7  # of a sample
Geometry = tuple[int, int, int]  # planes, lines, units
Fill = Callable[..., tuple[list[int], list[int]]]
# calls that ask about a tensor
QUESTIONS = {"__get__", "size", "dim", "ndimension", "numel", "nelement", "__len__", "stride"}
QUESTIONS |= {"is_contiguous", "is_floating_point", "is_complex", "get_device", "storage_offset"}
QUESTIONS |= {"element_size", "data_ptr"}


class Unknown(Exception):
    """Something that the kernels have no layer for."""

    place = ""  # " in LAYER"

    def __str__(self) -> str:
        return super().__str__() + self.place


@dataclass(eq=False)
class Slot:
    """Memory of the numbers that one op makes of a sample."""

    geometry: Geometry
    upstream: int  # the numbers depend on the columns of a row before this one
    tokens: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.geometry)


@dataclass(frozen=True)
class View:
    """Numbers of a slot: where each lies, without the samples' axis."""

    slot: Slot
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    axis: int = 0  # where the samples' axis was

    @property
    def whole(self) -> bool:
        """Whether it is all of the slot, in its order."""
        steps = [math.prod(self.shape[i + 1 :]) for i in range(len(self.shape))]
        axes = zip(self.shape, self.strides, steps, strict=True)
        dense = all(n == 1 or stride == step for n, stride, step in axes)
        return self.offset == 0 and math.prod(self.shape) == self.slot.size and dense


@dataclass(frozen=True)
class Use:
    """How an op reads a view: as planes, lines and units, or (geometry None) by strides."""

    view: View
    geometry: Geometry | None = None
    margin: tuple[int, int] = (0, 0)  # zeros that it reads around the lines and the units


@dataclass(eq=False)
class Op:
    """A layer to be.

    `fill` gives `size` and `table` once its uses and its output have their places.
    """

    kind: str
    uses: list[Use]
    out: Slot
    size: Sequence[int] = ()
    table: Sequence[int] = ()
    fill: Fill | None = None
    weight: int = -1
    bias: int = -1
    numbers: tuple[float, ...] = ()
    margin: tuple[int, int] = (0, 0)  # zeros around its output's gradient
    space: int = 0  # vectors of its own
    scratch: int = 0  # vectors that its call works in
    own: int = 0  # and those that each member of a team needs for itself
    in_place: bool = False  # its first input's gradient may lie where its output's does
    overwrites: bool = False  # its output may too: its way back does not read its input
    keeps: bool = True  # its way back reads its output, which then stays
    part: tuple[Geometry, int, int] | None = None  # it writes this, from this plane and unit on
    in_stage: bool = False  # it may be the convolution or the pool of a stage
    below: int = 0  # its tokens are below this; 0: any
    adds: int = 0  # bit i: use i's gradient is added to what is there
    place: str = ""  # " in LAYER"


def move(view: View, geometry: Geometry) -> Op:
    """Return the op that brings a view's numbers one after the other, in a slot of a geometry."""

    def fill(x: Any, y: Any) -> tuple[list[int], list[int]]:
        shape, strides = view.shape or (1,), view.strides or (1,)
        if view.whole:
            shape, strides = (x.planes, x.lines, x.units), (x.plane, x.line, 1)
        gathered, lists = gathering(shape, strides, y)
        return [len(shape), view.offset, gathered], [*shape, *strides, *lists]

    out = Slot(geometry, view.slot.upstream, view.slot.tokens)
    use = Use(view, view.slot.geometry if view.whole else None)
    return Op("move", [use], out, fill=fill, keeps=False)


def gathering(shape: Sequence[int], strides: Sequence[int], y: Any) -> tuple[int, list[int]]:
    """Return how many numbers are read by a view that reads some twice, and the lists of move.h.

    They are (0, []) where each number is read once. `y` is the value that the view is copied to.
    """
    span = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    read = torch.arange(span).as_strided(tuple(shape), tuple(strides)).flatten()
    places, counts = read.unique(return_counts=True)
    if len(places) == len(read):
        return 0, []
    order = read.argsort(stable=True)
    line, unit = order // y.units, order % y.units
    copies = line // y.lines * y.plane + line % y.lines * y.line + unit
    starts = [0, *counts.cumsum(0).tolist()]
    return len(places), [*places.tolist(), *starts, *copies.tolist()]


class Recorder(TorchFunctionMode):
    """Records what is called on tensors that depend on the sample."""

    def __init__(self, module: nn.Module, handlers: dict[str, Callable[..., Any]]):
        super().__init__()
        self.handlers = handlers
        self.ops: list[Op] = []
        self.slots: dict[int, Slot] = {}  # by where their memory starts
        self.alive: list[Tensor] = []  # so that no memory is given out twice
        self.where = [""]  # names of the layers that are being called
        self.dropping: KeyedDropout | None = None  # the dropout layer that is being called
        self.drops = 0
        self.used: list[range] = []  # columns of parameters
        self.parameters: list[tuple[Tensor, int]] = []  # and where in a row each starts
        for p in module.parameters():
            self.parameters.append((p, sum(before.numel() for before, _ in self.parameters)))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return self.call(func, args, kwargs or {})
        except Unknown as error:
            error.place = error.place or self.place()
            raise

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function of PyTorch, and record it unless it is a view or a question."""
        inputs = [t for t in tensors((args, kwargs)) if self.slot(t)]
        versions = [t._version for t in inputs]
        out = func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        made = tensors(out)
        changed = versions != [t._version for t in inputs]
        if not inputs or (not made and name in QUESTIONS):
            return out
        learns = any(t.requires_grad for t in inputs)
        if learns and any(t.is_floating_point() and not t.requires_grad for t in made):
            raise Unknown("a gradient that is stopped")
        if made and not changed and all(self.slot(t) for t in made):
            return out  # a view
        handler = self.handlers.get(name.strip("_"))
        if handler is None or not made or (changed and made[0] is not inputs[0]):
            raise Unknown(name.strip("_"))
        if changed:  # in place: views of this memory from now on see the new numbers
            if not self.view(inputs[0]).whole:
                raise Unknown(f"{name} on a part of a tensor")
        elif not made[0].is_contiguous():
            out = made[0] = made[0].contiguous()
        try:
            instead = handler(self, made[0], *args, **kwargs)
        except TypeError as error:
            raise Unknown(f"{name.strip('_')} called with other arguments") from error
        return out if instead is None else instead

    def place(self) -> str:
        """Return in which layer of the module the call is."""
        return f" in {self.where[-1]}" if self.where[-1] else ""

    def slot(self, tensor: Tensor) -> Slot | None:
        """Return the slot that a tensor lies in; None: it does not depend on the sample."""
        return self.slots.get(tensor.untyped_storage().data_ptr())

    def tracked(self, value: Any) -> bool:
        """Return whether a call's argument depends on the sample."""
        return isinstance(value, Tensor) and self.slot(value) is not None

    def dropout(self, layer: KeyedDropout, x: Tensor) -> Tensor:
        """Call PyTorch's dropout in place of a keyed layer, so that it is recorded."""
        self.dropping = layer
        return nn.functional.dropout(x, 0.5) if layer.training and layer.p else x

    def assign(self, tensor: Tensor, slot: Slot) -> None:
        """Let a tensor's memory stand for a slot."""
        self.alive.append(tensor)
        self.slots[tensor.untyped_storage().data_ptr()] = slot

    def view(self, tensor: Any) -> View:
        """Return a tensor as a view of its slot.

        `Unknown`: it has none, or the samples' axis is mixed with others.
        """
        slot = self.slot(tensor) if isinstance(tensor, Tensor) else None
        if slot is None:
            raise Unknown("a layer that works with constants")
        shape, strides = list(tensor.shape), list(tensor.stride())
        samples = [i for i, n in enumerate(shape) if n == S and strides[i] == slot.size]
        if len(samples) != 1:
            raise Unknown("a view across samples")
        del shape[samples[0]], strides[samples[0]]
        return View(slot, tuple(shape), tuple(strides), tensor.storage_offset(), samples[0])

    def leading(self, tensor: Any, tokens: bool = False) -> View:
        """Return a tensor whose first axis is the samples' as a view; `tokens` are allowed."""
        view = self.view(tensor)
        if (view.slot.tokens and not tokens) or len(view.shape) > MOST_AXES:
            raise Unknown("arithmetic with tokens, or so many axes")
        if view.axis:
            raise Unknown(f"samples along axis {view.axis}")
        return view

    def column(self, tensor: Any) -> int:
        """Return where in a row a parameter starts, -1 for None.

        `Unknown`: the tensor is no parameter.
        """
        if tensor is None:
            return -1
        memory = tensor.untyped_storage().data_ptr()
        for p, column in self.parameters:
            inside = tensor.storage_offset() - p.storage_offset()
            same = p.untyped_storage().data_ptr() == memory and tensor.is_contiguous()
            if same and 0 <= inside < p.numel():
                return column + inside
        raise Unknown("a weight that is computed")

    def record(self, out: Tensor, op: Op) -> None:
        """Append an op whose output is a tensor."""
        op.place = self.place()
        self.ops.append(op)
        self.assign(out, op.out)

    def layer(
        self, out: Tensor, kind: str, uses: list[Use], geometry: Geometry, *own: Any, **fields: Any
    ) -> None:
        """Append an op whose output, in a slot of this geometry, is a tensor.

        `own` are its weight and bias, `fields` those of the `Op`. A parameter has one op: two
        gradients would be added in an order that the width of vectors changes.
        """
        weight, bias = [*map(self.column, own), -1, -1][:2]
        columns = [(c, t) for c, t in zip((weight, bias), own, strict=False) if t is not None]
        ranges = [range(c, c + t.numel()) for c, t in columns]
        if any(a.start < b.stop and b.start < a.stop for a in ranges for b in self.used):
            raise Unknown("a weight that is used twice")
        self.used += ranges
        upstream = [use.view.slot.upstream for use in uses] + [own.stop for own in ranges]
        slot = Slot(geometry, max(upstream))
        self.record(out, Op(kind, uses, slot, weight=weight, bias=bias, **fields))


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors in a call's arguments or result."""
    return [part for part in tree_leaves(value) if isinstance(part, Tensor)]


def trace(
    module: nn.Module,
    shape: tuple[int, ...],
    dtype: str,
    handlers: dict[str, Callable[..., Any]],
    training: bool,
) -> tuple[list[Op], View, Slot]:
    """Return a module's ops on samples of a shape and dtype, its logits, and the sample's slot.

    Raises:
        Unknown: `handlers` lack a call, or the module cannot be followed; the text names the call.
    """
    module = copy.deepcopy(module)
    module = keyed(module.train(), Draws()) if training else module.eval()
    recorder = Recorder(module, handlers)
    where = recorder.where
    for name, part in module.named_modules():
        part.register_forward_pre_hook(lambda *_, name=name: where.append(name))  # type: ignore[misc]
        # not pop: what a hook returns would replace the module's result
        part.register_forward_hook(lambda *_: where.__delitem__(-1))
        if isinstance(part, KeyedDropout):
            part.forward = functools.partial(recorder.dropout, part)  # type: ignore[method-assign]
    h, w, c = shape if len(shape) == 3 else (1, shape[0], 1)
    sample = Slot((c, h, w), 0, dtype == "int32")
    x = torch.zeros(S, *(shape[2:] + shape[:2] if len(shape) == 3 else shape))
    # the result of a sum may be changed in place
    x = x.long() if sample.tokens else x.requires_grad_() + 0
    recorder.assign(x, sample)
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]), recorder:
            logits = module(x)
        return recorder.ops, recorder.leading(logits), sample
    except Unknown:
        raise
    except Exception as error:
        what = f"a forward that cannot be followed ({type(error).__name__})"
        raise Unknown(what + recorder.place()) from error


def image(shape: tuple[int, ...]) -> Geometry:
    """Return the shape of an image, channels first; [C, L] is an image of one line."""
    if len(shape) not in (2, 3):
        raise Unknown(f"images of the shape {shape}")
    return (shape[0], 1, shape[1]) if len(shape) == 2 else (shape[0], shape[1], shape[2])
