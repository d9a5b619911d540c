"""A module's forward as a list of `Op`: it is run once on samples of zeros, and every call of PyTorch that it makes is recorded.

A call that only looks at numbers from another side (view, permute, chunk, ...) needs no layer: its result lies in the memory of its input, and
torch's strides say where. Every other call must be one that `layers` knows.

Axes: S samples.
"""

import copy
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from dpfl_mpi.numerics.dropout import Draws, KeyedDropout, keyed

S = 3  # samples of the trial: an axis of this size and of a sample's stride is the one that becomes lanes
MOST_AXES = 7  # of a sample
Geometry = tuple[int, int, int]  # planes, lines, units
Fill = Callable[..., tuple[list[int], list[int]]]
ASKS = {"__get__", "size", "dim", "ndimension", "numel", "nelement", "__len__", "is_floating_point", "stride"}
ASKS |= {"is_contiguous", "get_device", "storage_offset", "element_size", "data_ptr", "is_complex"}


class Unknown(Exception):
    """What the kernels have no layer for."""


@dataclass(eq=False)
class Slot:
    """The numbers that one op makes of a sample: memory of their own, `size` vectors."""

    geometry: Geometry
    upstream: int  # the columns of a row before this one are what the numbers depend on
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
    offset: int
    axis: int  # where the samples' axis was

    @property
    def whole(self) -> bool:
        """Whether it is all of the slot, in its order."""
        steps = [math.prod(self.shape[i + 1 :]) for i in range(len(self.shape))]
        dense = all(n == 1 or stride == step for n, stride, step in zip(self.shape, self.strides, steps, strict=True))
        return self.offset == 0 and math.prod(self.shape) == self.slot.size and dense


@dataclass(frozen=True)
class Use:
    """How an op reads a view: as planes, lines and units, with so many zeros around the lines and units; None: by strides."""

    view: View
    geometry: Geometry | None = None
    margin: tuple[int, int] = (0, 0)


@dataclass(eq=False)
class Op:
    """A layer to be: its `size` and `table` are as here, or as `fill` gives them once the values of its uses and of `out` have their places."""

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
    scratch: int = 0
    in_place: bool = False  # whether its gradient may lie where that of its first input does
    overwrites: bool = False  # whether its numbers may, too: its way back does not read them
    keeps: bool = True  # whether its way back reads its own output, which then stays
    part: tuple[Geometry, int, int] | None = None  # of its output what it writes: the first plane and unit; None: all
    place: str = ""  # " in LAYER"
    facts: dict[str, Any] = field(default_factory=dict)


def move(view: View, geometry: Geometry) -> Op:
    """Return the op that brings a view's numbers one after the other, in a slot of a geometry."""
    out = Slot(geometry, view.slot.upstream, view.slot.tokens)

    def fill(x: Any, y: Any) -> tuple[list[int], list[int]]:
        """Dimensions of the source, and vectors from one number to the next in each."""
        shape, strides = view.shape or (1,), view.strides or (1,)
        if view.whole:
            shape, strides = (x.planes, x.lines, x.units), (x.plane, x.line, 1)
        return [len(shape), view.offset], [*shape, *strides]

    return Op("move", [Use(view, view.slot.geometry if view.whole else None)], out, fill=fill, keeps=False)


class Recorder(TorchFunctionMode):
    """Records what is called on tensors that depend on the sample."""

    def __init__(self, module: nn.Module, handlers: dict[str, Callable[..., Any]]):
        super().__init__()
        self.ops: list[Op] = []
        self.slots: dict[int, Slot] = {}  # by where their memory starts
        self.alive: list[Tensor] = []  # so that no memory is given out twice
        self.handlers, self.where, self.drops = handlers, [""], 0
        self.dropping: KeyedDropout | None = None
        self.used: list[range] = []  # columns of parameters
        self.parameters: list[tuple[Tensor, int]] = []  # and where in a row each starts
        for p in module.parameters():
            self.parameters.append((p, sum(before.numel() for before, _ in self.parameters)))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [t for t in tensors((args, kwargs)) if self.slot(t)]
        versions = [t._version for t in inputs]
        out = func(*args, **kwargs)
        if not inputs:
            return out
        name = getattr(func, "__name__", str(func))
        made = tensors(out)
        changed = versions != [t._version for t in inputs]
        if not made and name in ASKS:
            return out
        learns = any(t.requires_grad for t in inputs)
        if learns and any(t.is_floating_point() and not t.requires_grad for t in made):
            raise Unknown(f"a gradient that is stopped{self.place()}")
        if made and not changed and all(self.slot(t) for t in made):
            return out  # a view
        handler = self.handlers.get(name.strip("_"))
        if handler is None or not made or (changed and made[0] is not inputs[0]):
            raise Unknown(name.strip("_") + self.place())
        if changed:  # in place: what was read is what there was, and whoever looks there sees the new numbers
            if not self.view(inputs[0]).whole:
                raise Unknown(f"{name} on a part of a tensor{self.place()}")
        elif not made[0].is_contiguous():
            out = made[0] = made[0].contiguous()
        try:
            instead = handler(self, made[0], *args, **kwargs)
        except TypeError as error:
            raise Unknown(f"{name.strip('_')} called with other arguments{self.place()}") from error
        return out if instead is None else instead

    def place(self) -> str:
        """Return in which layer of the module that is."""
        return f" in {self.where[-1]}" if self.where[-1] else ""

    def slot(self, tensor: Tensor) -> Slot | None:
        """Return the slot that a tensor lies in, None where it does not depend on the sample."""
        return self.slots.get(tensor.untyped_storage().data_ptr())

    def tracked(self, value: Any) -> bool:
        """Return whether a call's argument depends on the sample."""
        return isinstance(value, Tensor) and self.slot(value) is not None

    def dropout(self, layer: KeyedDropout, x: Tensor) -> Tensor:
        """Call PyTorch's dropout, so that it is recorded, in place of a keyed layer."""
        self.dropping = layer
        return nn.functional.dropout(x, 0.5) if layer.training and layer.p else x

    def keep(self, tensor: Tensor, slot: Slot) -> None:
        """Let a tensor's memory stand for a slot."""
        self.alive.append(tensor)
        self.slots[tensor.untyped_storage().data_ptr()] = slot

    def view(self, tensor: Any) -> View:
        """Return a tensor as a view of its slot; one that is none, or in which the samples' axis is mixed with others, is unknown."""
        slot = self.slot(tensor) if isinstance(tensor, Tensor) else None
        if slot is None:
            raise Unknown(f"a layer that works with constants{self.place()}")
        shape, strides = list(tensor.shape), list(tensor.stride())
        samples = [i for i, n in enumerate(shape) if n == S and strides[i] == slot.size]
        if len(samples) != 1:
            raise Unknown(f"a view across samples{self.place()}")
        del shape[samples[0]], strides[samples[0]]
        return View(slot, tuple(shape), tuple(strides), tensor.storage_offset(), samples[0])

    def leading(self, tensor: Any, tokens: bool = False) -> View:
        """Return a tensor as a view whose first axis is that of the samples; of whole numbers only where `tokens` are known."""
        view = self.view(tensor)
        if (view.slot.tokens and not tokens) or len(view.shape) > MOST_AXES:
            raise Unknown(f"arithmetic with tokens, or so many axes{self.place()}")
        if view.axis:
            raise Unknown(f"samples along axis {view.axis}{self.place()}")
        return view

    def column(self, tensor: Any) -> int:
        """Return where in a row a parameter starts; what is none is unknown. -1 of None."""
        if tensor is None:
            return -1
        start = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
        for p, column in self.parameters:
            inside = start[1] - p.storage_offset()
            if p.untyped_storage().data_ptr() == start[0] and 0 <= inside < p.numel() and tensor.is_contiguous():
                return column + inside
        raise Unknown(f"a weight that is computed{self.place()}")

    def record(self, out: Tensor, op: Op) -> None:
        """Append an op whose output is a tensor."""
        op.place = self.place()
        self.ops.append(op)
        self.keep(out, op.out)

    def layer(
        self,
        out: Tensor,
        kind: str,
        uses: list[Use],
        geometry: Geometry,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        **more: Any,
    ) -> None:
        """Append an op whose output, in a slot of this geometry, is a tensor; `more` are fields of the `Op`.

        The gradients of two ops would be added in an order that the width of vectors changes: a parameter has one op.
        """
        columns = self.column(weight), self.column(bias)
        own = [range(c, c + t.numel()) for c, t in zip(columns, (weight, bias), strict=True) if t is not None]
        if any(one.start < other.stop and other.start < one.stop for one in own for other in self.used):
            raise Unknown(f"a weight that is used twice{self.place()}")
        self.used += own
        slot = Slot(geometry, max([use.view.slot.upstream for use in uses] + [one.stop for one in own]))
        self.record(out, Op(kind, uses, slot, weight=columns[0], bias=columns[1], **more))


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors in a call's arguments or result."""
    return [part for part in tree_leaves(value) if isinstance(part, Tensor)]


def trace(
    module: nn.Module, shape: tuple[int, ...], dtype: str, handlers: dict[str, Callable[..., Any]], training: bool
) -> tuple[list[Op], View, Slot]:
    """Return what a module computes of samples of a shape and dtype, as it trains or as it scores: its ops, the view of its logits, the slot of the sample.

    Raises:
        Unknown: `handlers` lack a call, or the module cannot be followed; the text names the call.
    """
    module = copy.deepcopy(module)
    module = keyed(module.train(), Draws()) if training else module.eval()
    recorder = Recorder(module, handlers)
    for name, part in module.named_modules():
        part.register_forward_pre_hook(lambda *_, name=name: recorder.where.append(name))  # type: ignore[misc]
        part.register_forward_hook(lambda *_: recorder.where.__delitem__(-1))  # not pop: a result replaces the module's
        if isinstance(part, KeyedDropout):
            part.forward = functools.partial(recorder.dropout, part)  # type: ignore[method-assign]
    h, w, c = shape if len(shape) == 3 else (1, shape[0], 1)
    sample = Slot((c, h, w), 0, dtype == "int32")
    x = torch.zeros(S, *(shape[2:] + shape[:2] if len(shape) == 3 else shape))
    x = x.long() if sample.tokens else x.requires_grad_() + 0  # the result of a sum may be changed in place
    recorder.keep(x, sample)
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]), recorder:
            logits = module(x)
        return recorder.ops, recorder.leading(logits), sample
    except Unknown:
        raise
    except Exception as error:
        raise Unknown(f"a forward that cannot be followed ({type(error).__name__}){recorder.place()}") from error


def image(shape: tuple[int, ...]) -> Geometry:
    """Return the shape of an image, channels first; of [C, L] as that of an image of one line."""
    if len(shape) not in (2, 3):
        raise Unknown(f"images of the shape {shape}")
    return (shape[0], 1, shape[1]) if len(shape) == 2 else (shape[0], shape[1], shape[2])
