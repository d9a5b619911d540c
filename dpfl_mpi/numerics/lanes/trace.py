"""Record a module's forward as a list of `Op`, from one run on three samples of zeros.

An `Op` is a layer of the kernels in C. A `Slot` is memory for what one op makes of one sample, a
`View` is some of a slot's numbers, by shape and strides. A client's parameters lie one after the
other in a row; a column is a place in it. While the module runs, `Recorder` sees each call of
PyTorch. One that only rearranges numbers (view, permute, chunk, ...) needs no op: its result lies
in the memory of its input. Others need a handler, a function of `layers.py` or `joins.py`, which
appends ops. `kernels.describe` calls `trace`; `plan` then gives each slot its place in memory.
"""

import copy
import functools
import itertools
import math
import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from traceback import walk_stack, walk_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from dpfl_mpi.errors import own_line
from dpfl_mpi.numerics.dropout import Draws, KeyedAttention, KeyedDropout, keyed

# what records a call, by the name of PyTorch's function; `handles` fills it
HANDLERS: dict[str, Callable[..., Any]] = {}
TRIAL_SAMPLES = 3  # the samples' axis is known by this size and the stride of a whole sample
MAX_AXES = 7  # of a sample
Geometry = tuple[int, int, int]  # planes, lines, units: channels, height, width of an image
Fill = Callable[..., tuple[list[int], list[int]]]  # returns `size` and `table` of an `Op`
# calls that ask about a tensor
QUESTIONS = {"__get__", "size", "dim", "ndimension", "numel", "nelement", "__len__", "stride"}
QUESTIONS |= {"is_contiguous", "is_floating_point", "is_complex", "get_device", "storage_offset"}
QUESTIONS |= {"element_size", "data_ptr"}
# calls whose samples may be along any axis but the last
ROWWISE = {"linear", "layer_norm", "rms_norm", "add", "sub", "mul", "relu", "gelu", "elu", "silu"}


def handles(*names: str, **arguments: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function, with these further arguments, the handler of the calls of these names."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        HANDLERS.update(dict.fromkeys(names, functools.partial(function, **arguments)))
        return function

    return register


class Unsupported(Exception):
    """A call that the kernels have no layer for; PyTorch then computes the whole model."""

    location = ""  # " in LAYER (FILE, line N)"

    def __str__(self) -> str:
        return super().__str__() + self.location


class UsedTwice(Unsupported):
    column: int  # where the parameter starts that two ops would read from the row


@dataclass(eq=False)
class Slot:
    """Memory for the numbers that one op makes of one sample."""

    geometry: Geometry
    # the numbers depend on no parameter from this column of a client's row on; 0: on none at all
    upstream: int
    tokens: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.geometry)


@dataclass(frozen=True)
class View:
    """Some numbers of a slot, as a tensor of this shape, without the samples' axis."""

    slot: Slot
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    axis: int = 0  # where the samples' axis was

    @property
    def whole(self) -> bool:
        """Whether the view is all of the slot, in its order."""
        axes = zip(self.shape, self.strides, dense_strides(self.shape), strict=True)
        dense = all(n == 1 or stride == step for n, stride, step in axes)
        return self.offset == 0 and math.prod(self.shape) == self.slot.size and dense


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of numbers that lie one after the other."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def whole(slot: Slot) -> View:
    """Return all of a slot as a view."""
    return View(slot, slot.geometry, dense_strides(slot.geometry))


@dataclass(frozen=True)
class Use:
    """A view as an op reads it: as planes, lines and units, or (geometry None) by its strides."""

    view: View
    geometry: Geometry | None = None
    margin: tuple[int, int] = (0, 0)  # zeros that the op reads around the lines and the units


@dataclass(eq=False)
class Op:
    """A layer of the network. docs/kernels.md explains `in_place`, `overwrites`, `keeps`, `margin`.

    The integers `size` and `table` are explained beside the kind's function in C.
    `fill(*inputs, output)` computes both where they depend on places in memory.
    """

    kind: str  # the name of the layer's function in C
    uses: list[Use]  # its inputs, one or two
    out: Slot
    size: Sequence[int] = ()
    table: Sequence[int] = ()
    fill: Fill | None = None
    weight: int = -1  # the column where its weight starts; -1: it has none
    bias: int = -1
    numbers: tuple[float, ...] = ()
    margin: tuple[int, int] = (0, 0)  # zeros around its output's gradient
    space: int = 0  # vectors that it keeps from the way forward to the way back
    scratch: int = 0  # vectors that it works in during a call
    thread_scratch: int = 0  # further ones, which each thread of a client has for itself
    in_place: bool = False  # its first input's gradient may lie where its output's does
    # its output may lie where its first input does: its way back does not read that
    overwrites: bool = False
    keeps: bool = True  # its way back reads its output, which then stays
    # the part of `out` that it writes: its geometry, first plane, first unit; None: all
    part: tuple[Geometry, int, int] | None = None
    in_stage: bool = False  # `plan.with_stages` may make one layer of it and others
    below: int = 0  # its tokens are below this; 0: they may be any
    adds: int = 0  # bit i: the gradient of use i is added to what is there
    location: str = ""  # " in LAYER (FILE, line N)"


def move(view: View, geometry: Geometry) -> Op:
    """Return the op that copies a view's numbers, one after the other, to a slot of a geometry."""

    def fill(x: Any, y: Any) -> tuple[list[int], list[int]]:
        shape, strides = view.shape or (1,), view.strides or (1,)
        if view.whole:  # x may have zeros around its lines, which the view's strides do not know
            shape, strides = (x.planes, x.lines, x.units), (x.plane_step, x.line_step, 1)
        gathered, lists = copies(shape, strides, y)
        return [len(shape), view.offset, gathered], [*shape, *strides, *lists]

    out = Slot(geometry, view.slot.upstream, view.slot.tokens)
    use = Use(view, view.slot.geometry if view.whole else None)
    return Op("move", [use], out, fill=fill, keeps=False)


def copies(shape: Sequence[int], strides: Sequence[int], y: Any) -> tuple[int, list[int]]:
    """Return how many different numbers a view reads, and the three lists of move.h about them.

    They say where the copies of each number lie in the value `y`; its gradient is their sum. For a
    view that reads each number once the result is (0, []).
    """
    span = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    read = torch.arange(span).as_strided(tuple(shape), tuple(strides)).flatten()
    places, counts = read.unique(return_counts=True)
    if len(places) == len(read):
        return 0, []
    order = read.argsort(stable=True)  # copies of one number side by side
    line, unit = order // y.units, order % y.units
    in_y = line // y.lines * y.plane_step + line % y.lines * y.line_step + unit
    starts = [0, *counts.cumsum(0).tolist()]
    return len(places), [*places.tolist(), *starts, *in_y.tolist()]


class Recorder(TorchFunctionMode):
    """Appends to `ops` what is called on tracked tensors, those that depend on the sample.

    PyTorch sends each call inside `with recorder:` to `__torch_function__`, but none while that
    runs: a handler that wants its own calls recorded makes them in another `with recorder:`.
    """

    def __init__(self, module: nn.Module, sample: Slot, shared: frozenset[int]):
        """`shared`: columns of parameters that ops read from a slot, where gradients add up."""
        super().__init__()
        self.sample, self.shared = sample, shared
        self.ops: list[Op] = []
        self.slots: dict[int, Slot] = {}  # of each tracked tensor, by the address of its memory
        self.given: dict[Any, Slot] = {}  # parameters and constants that ops "given" copy to slots
        self.kept_alive: list[Tensor] = []  # so that no address is given out twice
        self.layer_names = [""]  # of the layers that are being called, the innermost last
        self.dropping: KeyedDropout | None = None  # the layer whose dropout is called next
        self.drops = 0
        self.claimed: list[range] = []  # columns that ops read as their weight or bias
        self.parameters: list[tuple[Tensor, int]] = []  # each with the column where it starts
        for p in module.parameters():
            self.parameters.append((p, sum(before.numel() for before, _ in self.parameters)))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return self.call(func, args, kwargs or {})
        except Unsupported as error:
            error.location = error.location or self.location()
            raise

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function of PyTorch; record it unless it only rearranges or asks."""
        inputs = [t for t in tensors((args, kwargs)) if self.slot(t)]
        versions = [t._version for t in inputs]  # how often PyTorch changed each in place
        out = func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        plain_name = name.strip("_")  # of add_ and __add__, too
        results = tensors(out)
        changed = versions != [t._version for t in inputs]  # the call worked in place
        if not inputs:  # a few calls on parameters alone have handlers, such as expand
            handler = HANDLERS.get(f"{name} of a parameter")
            instead = handler(self, out, *args, **kwargs) if handler and out.requires_grad else None
            return out if instead is None else instead
        # calls that need no op
        learns = any(t.requires_grad for t in inputs)
        constant = name.startswith("new_") or (learns and name in ("zeros_like", "ones_like"))
        if constant or (not results and name in QUESTIONS):
            return out
        if learns and any(t.is_floating_point() and not t.requires_grad for t in results):
            raise Unsupported("a gradient that is stopped")
        if results and not changed and all(self.slot(t) for t in results):
            return out  # a view
        # the others go to their handler
        handler = HANDLERS.get(plain_name) if results else None
        into = changed or any(t is r for t in tensors((args, kwargs)) for r in results[:1])
        if handler is None or (into and results[0] is not inputs[0]):  # into another argument
            raise Unsupported(plain_name)
        if plain_name in ROWWISE and not changed and (axis := self.view(inputs[0]).axis):
            # bring the samples to the first axis, call again, and bring them back
            alike = lambda t: isinstance(t, Tensor) and t.dim() == inputs[0].dim()  # noqa: E731
            args, kwargs = tree_map(lambda t: t.movedim(axis, 0) if alike(t) else t, (args, kwargs))
            with self:
                return func(*args, **kwargs).movedim(0, axis)
        if changed:  # in place: views of this memory from now on see the new numbers
            if not self.view(inputs[0]).whole:
                raise Unsupported(f"{name} on a part of a tensor")
        elif not results[0].is_contiguous():
            out = results[0] = results[0].contiguous()
        try:
            instead = handler(self, results[0], *args, **kwargs)
        except TypeError as error:
            raise Unsupported(f"{plain_name} called with other arguments") from error
        return out if instead is None else instead

    def location(self, error: Exception | None = None) -> str:
        """Return " in LAYER (FILE, line N)": where the module made this call or this error."""
        layer = f" in {self.layer_names[-1]}" if self.layer_names[-1] else ""
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
        """Note that a tensor's memory stands for a slot."""
        self.kept_alive.append(tensor)
        self.slots[tensor.untyped_storage().data_ptr()] = slot

    def view(self, tensor: Any) -> View:
        """Return a tracked tensor as a view of its slot, whichever axis is that of the samples."""
        slot = self.slot(tensor) if isinstance(tensor, Tensor) else None
        if slot is None:
            raise Unsupported("a layer that works with constants")
        axes = [*zip(tensor.shape, tensor.stride(), strict=True)]
        samples = [i for i, axis in enumerate(axes) if axis == (TRIAL_SAMPLES, slot.size)]
        if len(samples) != 1:
            raise Unsupported("a view across samples")
        del axes[samples[0]]
        shape, strides = (tuple(axis[i] for axis in axes) for i in range(2))
        return View(slot, shape, strides, tensor.storage_offset(), samples[0])

    def sample_view(self, tensor: Any, tokens: bool = False) -> View:
        """Return what a tensor, with the samples' axis first, has of one sample, as a view.

        It may be made of parameters or constants. Only with `tokens` may its numbers be tokens.
        """
        if isinstance(tensor, Tensor) and not self.tracked(tensor):
            return self.given_view(tensor)
        view = self.view(tensor)
        if (view.slot.tokens and not tokens) or len(view.shape) > MAX_AXES:
            raise Unsupported("arithmetic with tokens, or so many axes")
        if view.axis:
            raise Unsupported(f"samples along axis {view.axis}")
        return view

    def given_view(self, tensor: Tensor) -> View:
        """Return parameters or constants as a view of a slot that an op "given" fills.

        The first axis is that of the samples, which all must have the same numbers.
        """
        if not tensor.dim() or len(tensor) != TRIAL_SAMPLES or (tensor != tensor[:1]).any():
            raise Unsupported("numbers that differ between samples")
        numbers = one = tensor[0]
        for axis in range(one.dim()):  # copy an expanded axis once
            if not one.stride(axis):
                numbers = numbers.narrow(axis, 0, 1)
        learns, offset = numbers.requires_grad, 0
        table = [] if learns else numbers.float().flatten().view(torch.int32).tolist()
        if learns and (not numbers.is_contiguous() or self.is_shared(numbers)):
            # copy the whole parameter, and read this part of it
            offset, strides = int(numbers.storage_offset()), one.stride()
            numbers = self.parameter(numbers)[0]
            offset -= int(numbers.storage_offset())
        else:
            numbers = numbers.contiguous()
            strides = tuple(map(operator.mul, numbers.stride(), map(bool, one.stride())))
        column = self.column(numbers) if learns else -1
        key = tuple(table) or (column, numbers.numel())
        if key not in self.given:
            upstream = self.claim(numbers)[0].stop if learns else 0
            self.given[key] = Slot((1, 1, numbers.numel()), upstream)
            use = Use(whole(self.sample))  # each op has an input; this one does not read it
            op = Op("given", [use], self.given[key], table=table, weight=column, keeps=False)
            self.ops.append(replace(op, location=self.location()))
        return View(self.given[key], tuple(one.shape), strides, offset)

    def is_shared(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in a shared parameter."""
        return self.parameter(tensor)[1] in self.shared

    def parameter(self, tensor: Tensor) -> tuple[Tensor, int]:
        """Return the parameter that a tensor lies in, and the column where that starts."""
        memory = tensor.untyped_storage().data_ptr()
        for p, column in self.parameters:
            inside = tensor.storage_offset() - p.storage_offset()
            if p.untyped_storage().data_ptr() == memory and 0 <= inside < p.numel():
                return p, column
        made = tensor.grad_fn.name().partition("Backward")[0].lower() if tensor.grad_fn else ""
        raise Unsupported(f"{made} of a parameter" if made else "a weight that is no parameter")

    def column(self, tensor: Tensor | None) -> int:
        """Return the column where a parameter, or a part of one, starts; -1 for None."""
        if tensor is None:
            return -1
        p, column = self.parameter(tensor)
        if not tensor.is_contiguous():
            raise Unsupported("a parameter in another order")
        return column + int(tensor.storage_offset() - p.storage_offset())

    def claim(self, *weights: Tensor | None) -> list[range]:
        """Return the columns of an op's weight and bias, and note that they are taken.

        The gradients of two ops would be added in an order that depends on the width of vectors.
        """
        present = [t for t in weights if t is not None]
        columns = [range(start := self.column(t), start + t.numel()) for t in present]
        for a, t in zip(columns, present, strict=True):
            if any(a.start < b.stop and b.start < a.stop for b in self.claimed):
                error = UsedTwice("a weight that is used twice")
                error.column = self.parameter(t)[1]
                raise error
        self.claimed += columns
        return columns

    def add(self, out: Tensor, op: Op) -> None:
        """Append an op, and note that the tensor `out` is its output."""
        op.location = self.location()
        self.ops.append(op)
        self.assign(out, op.out)

    def add_layer(
        self, out: Tensor, kind: str, uses: list[Use], shape: Geometry, *weights: Any, **fields: Any
    ) -> None:
        """Append an op whose output, in a new slot of this shape, is the tensor `out`.

        `weights` are its weight and bias, `fields` other fields of the `Op`.
        """
        weight, bias = [*map(self.column, weights), -1, -1][:2]
        upstream = [use.view.slot.upstream for use in uses]
        upstream += [columns.stop for columns in self.claim(*weights)]
        slot = Slot(shape, max(upstream))
        self.add(out, Op(kind, uses, slot, weight=weight, bias=bias, **fields))


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors in a call's arguments or result."""
    return [part for part in tree_leaves(value) if isinstance(part, Tensor)]


def trace(
    module: nn.Module,
    shape: tuple[int, ...],
    dtype: str,
    training: bool,
    shared: frozenset[int] = frozenset(),
) -> tuple[list[Op], View, Slot]:
    """Return a module's ops on samples of a shape and dtype, its logits, and the sample's slot.

    `shared` are the columns of parameters that an earlier try found to be used twice.
    `Unsupported`: a call has no handler, or the module cannot be followed.
    """
    original, module = module, copy.deepcopy(module)
    module = keyed(module.train(), Draws()) if training else module.eval()
    h, w, c = shape if len(shape) == 3 else (1, shape[0], 1)
    sample = Slot((c, h, w), 0, dtype == "int32")
    recorder = Recorder(module, sample, shared)
    names = recorder.layer_names
    for name, part in module.named_modules():
        part.register_forward_pre_hook(lambda *_, name=name: names.append(name))  # type: ignore[misc]
        # not pop: what a hook returns would replace the module's result
        part.register_forward_hook(lambda *_: names.__delitem__(-1))
        if isinstance(part, KeyedDropout):
            part.forward = functools.partial(recorder.dropout, part)  # type: ignore[method-assign]
        elif isinstance(part, KeyedAttention):
            part.forward = functools.partial(recorder.attention, part)  # type: ignore[method-assign]
    x = torch.zeros(TRIAL_SAMPLES, *(shape[2:] + shape[:2] if len(shape) == 3 else shape))
    # + 0: PyTorch lets no call change a leaf in place
    x = x.long() if sample.tokens else x.requires_grad_() + 0
    recorder.assign(x, sample)
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]), recorder:
            logits = module(x)
        return recorder.ops, recorder.sample_view(logits), sample
    except UsedTwice as error:
        if error.column in shared:
            raise
        return trace(original, shape, dtype, training, shared | {error.column})
    except Unsupported:
        raise
    except Exception as error:
        what = f"a forward that cannot be followed ({type(error).__name__})"
        raise Unsupported(what + recorder.location(error)) from error


def image(shape: tuple[int, ...]) -> Geometry:
    """Return the shape of an image, channels first; [C, L] is an image of one line."""
    if len(shape) not in (2, 3):
        raise Unsupported(f"images of the shape {shape}")
    return (shape[0], 1, shape[1]) if len(shape) == 2 else (shape[0], shape[1], shape[2])
