"""Record a module's forward as a list of `Op`, from one run on samples of zeros.

A call that only looks at numbers from another side (view, permute, chunk, ...) needs no layer: its
result lies in the memory of its input, and its strides say where. Every other call must be one that
`layers` or `joins` handles.

Axes: S samples.
"""

import copy
import functools
import itertools
import math
import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from traceback import walk_stack, walk_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from dpfl_mpi.errors import own_line
from dpfl_mpi.numerics.dropout import Draws, KeyedAttention, KeyedDropout, keyed

S = 3  # samples of the trial: an axis of this size and of a sample's stride becomes the lanes
MOST_AXES = 7  # of a sample
Geometry = tuple[int, int, int]  # planes, lines, units
Fill = Callable[..., tuple[list[int], list[int]]]
# calls that ask about a tensor
QUESTIONS = {"__get__", "size", "dim", "ndimension", "numel", "nelement", "__len__", "stride"}
QUESTIONS |= {"is_contiguous", "is_floating_point", "is_complex", "get_device", "storage_offset"}
QUESTIONS |= {"element_size", "data_ptr"}

# calls whose samples may be along any axis but the last
ROWWISE = {"linear", "layer_norm", "rms_norm", "add", "sub", "mul", "relu", "gelu", "elu", "silu"}


class Unknown(Exception):
    """Something that the kernels have no layer for."""

    place = ""  # " in LAYER (FILE, line N)"

    def __str__(self) -> str:
        return super().__str__() + self.place


class Twice(Unknown):
    """A parameter that two ops would read as a row's numbers."""

    def __init__(self, column: int):
        super().__init__("a weight that is used twice")
        self.column = column  # where it starts


@dataclass(eq=False)
class Slot:
    """Memory of the numbers that one op makes of a sample."""

    geometry: Geometry
    # the numbers depend on no parameter from this column of a client's row on; 0: on none at all
    upstream: int
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


def whole(slot: Slot) -> View:
    """Return all of a slot as a view."""
    _, lines, units = slot.geometry
    return View(slot, slot.geometry, (lines * units, units, 1))


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
    place: str = ""  # " in LAYER (FILE, line N)"


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
    """Records what is called on tensors that depend on the sample.

    `shared` are parameters, by their columns, that are read as values and so may have many readers.
    """

    def __init__(
        self,
        module: nn.Module,
        handlers: dict[str, Callable[..., Any]],
        sample: Slot,
        shared: frozenset[int],
    ):
        super().__init__()
        self.handlers, self.sample, self.shared = handlers, sample, shared
        self.ops: list[Op] = []
        self.slots: dict[int, Slot] = {}  # by where their memory starts
        self.alike: dict[Any, Slot] = {}  # of all samples: by column and size, or their bytes
        self.alive: list[Tensor] = []  # so that no memory is given out twice
        self.where = [""]  # names of the layers that are being called
        self.dropping: KeyedDropout | None = None  # the dropout that is called next
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
        if not inputs:
            lift = self.handlers.get(f"{name} of a parameter")
            lifted = lift(self, out, *args, **kwargs) if lift and out.requires_grad else None
            return out if lifted is None else lifted
        learns = any(t.requires_grad for t in inputs)
        constant = name.startswith("new_") or (learns and name in ("zeros_like", "ones_like"))
        if constant or (not made and name in QUESTIONS):
            return out
        if learns and any(t.is_floating_point() and not t.requires_grad for t in made):
            raise Unknown("a gradient that is stopped")
        if made and not changed and all(self.slot(t) for t in made):
            return out  # a view
        handler = self.handlers.get(name.strip("_"))
        into = any(t is made[0] for t in tensors((args, kwargs))) if made else False
        if handler is None or not made or ((changed or into) and made[0] is not inputs[0]):
            raise Unknown(name.strip("_"))
        if name.strip("_") in ROWWISE and not changed and (axis := self.view(inputs[0]).axis):
            alike = lambda t: isinstance(t, Tensor) and t.dim() == inputs[0].dim()  # noqa: E731
            args, kwargs = tree_map(lambda t: t.movedim(axis, 0) if alike(t) else t, (args, kwargs))
            with self:
                return func(*args, **kwargs).movedim(0, axis)
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

    def place(self, error: Exception | None = None) -> str:
        """Return in which layer of the module, and line of its code, the call is, or an error."""
        layer = f" in {self.where[-1]}" if self.where[-1] else ""
        frames = reversed([*walk_tb(error.__traceback__)]) if error else walk_stack(sys._getframe())
        inside = itertools.takewhile(lambda frame: frame[0].f_code is not trace.__code__, frames)
        return layer + own_line(inside)

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

    def attention(self, layer: KeyedAttention, *args: Any, **kwargs: Any) -> Any:
        """Call PyTorch's attention in place of a keyed layer, so that it is recorded."""
        self.dropping = layer.drop
        return nn.MultiheadAttention.forward(layer, *args, **kwargs)

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
        """Return a tensor whose first axis is the samples' as a view; `tokens` are allowed.

        It may be parameters or constants that are the same for all samples.
        """
        if isinstance(tensor, Tensor) and not self.tracked(tensor):
            return self.same(tensor)
        view = self.view(tensor)
        if (view.slot.tokens and not tokens) or len(view.shape) > MOST_AXES:
            raise Unknown("arithmetic with tokens, or so many axes")
        if view.axis:
            raise Unknown(f"samples along axis {view.axis}")
        return view

    def same(self, tensor: Tensor) -> View:
        """Return a tensor that is the same for all samples as a view of parameters or constants."""
        if not tensor.dim() or len(tensor) != S or not bool((tensor == tensor[:1]).all()):
            raise Unknown("numbers that differ between samples")
        own = one = tensor[0]
        for axis in range(one.dim()):
            if not one.stride(axis):
                own = own.narrow(axis, 0, 1)
        table = [] if own.requires_grad else own.float().flatten().view(torch.int32).tolist()
        offset = 0
        if not table and (not own.is_contiguous() or self.is_shared(own)):
            offset, strides = int(own.storage_offset()), one.stride()
            own = self.parameter(own)[0]
            offset -= int(own.storage_offset())
        else:
            own = own.contiguous()
            strides = tuple(map(operator.mul, own.stride(), map(bool, one.stride())))
        column = -1 if table else self.column(own)
        key = tuple(table) or (column, own.numel())
        if key not in self.alike:
            self.alike[key] = Slot((1, 1, own.numel()), 0 if table else self.claim(own)[0].stop)
            use = Use(whole(self.sample))  # which it does not read
            op = Op("given", [use], self.alike[key], table=table, weight=column, keeps=False)
            op.place = self.place()
            self.ops.append(op)
        return View(self.alike[key], tuple(one.shape), strides, offset)

    def is_shared(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in a parameter that is read as a value."""
        return self.parameter(tensor)[1] in self.shared

    def parameter(self, tensor: Tensor) -> tuple[Tensor, int]:
        """Return the parameter that a tensor lies in, and where in a row that starts.

        `Unknown`: it lies in none.
        """
        memory = tensor.untyped_storage().data_ptr()
        for p, column in self.parameters:
            inside = tensor.storage_offset() - p.storage_offset()
            if p.untyped_storage().data_ptr() == memory and 0 <= inside < p.numel():
                return p, column
        made = tensor.grad_fn.name().partition("Backward")[0].lower() if tensor.grad_fn else ""
        raise Unknown(f"{made} of a parameter" if made else "a weight that is no parameter")

    def column(self, tensor: Tensor | None) -> int:
        """Return where in a row a parameter, or a part of one, starts, -1 for None."""
        if tensor is None:
            return -1
        p, column = self.parameter(tensor)
        if not tensor.is_contiguous():
            raise Unknown("a parameter in another order")
        return column + int(tensor.storage_offset() - p.storage_offset())

    def claim(self, *own: Tensor | None) -> list[range]:
        """Return the columns of an op's parameters, and note that they are taken.

        A parameter has one such op. The gradients of two would be added in an order that depends
        on the width of vectors.
        """
        there = [t for t in own if t is not None]
        out = [range(c := self.column(t), c + t.numel()) for t in there]
        for a, t in zip(out, there, strict=True):
            if any(a.start < b.stop and b.start < a.stop for b in self.used):
                raise Twice(self.parameter(t)[1])
        self.used += out
        return out

    def record(self, out: Tensor, op: Op) -> None:
        """Append an op, and note that its output is `out`."""
        op.place = self.place()
        self.ops.append(op)
        self.assign(out, op.out)

    def layer(
        self, out: Tensor, kind: str, uses: list[Use], geometry: Geometry, *own: Any, **fields: Any
    ) -> None:
        """Append an op, and note that its output, in a new slot of this geometry, is `out`.

        `own` are its weight and bias, `fields` other fields of the `Op`.
        """
        weight, bias = [*map(self.column, own), -1, -1][:2]
        upstream = [use.view.slot.upstream for use in uses] + [c.stop for c in self.claim(*own)]
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
    shared: frozenset[int] = frozenset(),
) -> tuple[list[Op], View, Slot]:
    """Return a module's ops on samples of a shape and dtype, its logits, and the sample's slot.

    `Recorder` says what `shared` is.

    Raises:
        Unknown: `handlers` lack a call, or the module cannot be followed; the text names the call.
    """
    given, module = module, copy.deepcopy(module)
    module = keyed(module.train(), Draws()) if training else module.eval()
    h, w, c = shape if len(shape) == 3 else (1, shape[0], 1)
    sample = Slot((c, h, w), 0, dtype == "int32")
    recorder = Recorder(module, handlers, sample, shared)
    where = recorder.where
    for name, part in module.named_modules():
        part.register_forward_pre_hook(lambda *_, name=name: where.append(name))  # type: ignore[misc]
        # not pop: what a hook returns would replace the module's result
        part.register_forward_hook(lambda *_: where.__delitem__(-1))
        if isinstance(part, KeyedDropout):
            part.forward = functools.partial(recorder.dropout, part)  # type: ignore[method-assign]
        elif isinstance(part, KeyedAttention):
            part.forward = functools.partial(recorder.attention, part)  # type: ignore[method-assign]
    x = torch.zeros(S, *(shape[2:] + shape[:2] if len(shape) == 3 else shape))
    # the result of a sum may be changed in place
    x = x.long() if sample.tokens else x.requires_grad_() + 0
    recorder.assign(x, sample)
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]), recorder:
            logits = module(x)
        return recorder.ops, recorder.leading(logits), sample
    except Twice as error:
        if error.column in shared:
            raise
        return trace(given, shape, dtype, handlers, training, shared | {error.column})
    except Unknown:
        raise
    except Exception as error:
        what = f"a forward that cannot be followed ({type(error).__name__})"
        raise Unknown(what + recorder.place(error)) from error


def image(shape: tuple[int, ...]) -> Geometry:
    """Return the shape of an image, channels first; [C, L] is an image of one line."""
    if len(shape) not in (2, 3):
        raise Unknown(f"images of the shape {shape}")
    return (shape[0], 1, shape[1]) if len(shape) == 2 else (shape[0], shape[1], shape[2])
