"""Handlers of calls on several values: sums, products, parts, attention, recurrent layers.

`layers.py` says how a handler is called and what `recorder`, `out` and `with recorder:` are. Here
a call often becomes simpler calls, each recorded by its own handler. A value may also be the same
for all samples, a parameter or a constant; `recorder.sample_view` makes a view of it, too.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from dpfl_mpi.numerics.dropout import BITS
from dpfl_mpi.numerics.lanes.layers import add_each, add_pool, flat
from dpfl_mpi.numerics.lanes.trace import (
    TRIAL_SAMPLES,
    Geometry,
    Op,
    Slot,
    Unsupported,
    Use,
    View,
    dense_strides,
    handles,
    image,
    move,
    tensors,
)

# how NumPy names ways of padding
PADDINGS: dict[str, Any] = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}
JOINS = ("add", "sub", "mul", "div", "choose")  # in the order of join.h


# sums, products, parts -----------------------------------------------------------------------
def is_number(value: Any) -> bool:
    """Return whether a call's argument is a constant scalar."""
    constant = isinstance(value, Tensor) and value.dim() == 0 and not value.requires_grad
    return isinstance(value, int | float) or constant


@handles("add", "radd", "iadd")
@handles("sub", "isub", "subtract", what="sub")
@handles("mul", "rmul", "imul", "multiply", what="mul")
@handles("div", "truediv", "true_divide", "itruediv", "divide", what="div")
def arithmetic(recorder, out, input, other, *, alpha=1, what="add"):
    """Record a sum or product of two values, or of a value and a number or parameter."""
    if what == "add" and out.dtype == torch.bool:
        raise Unsupported("add of yes and no")
    if is_number(other) and not recorder.tracked(other):  # x + n is a line a x + b
        n = float(other) * alpha
        inverse = 1 / n if n else math.inf
        lines = {"add": (1.0, n), "sub": (1.0, -n), "mul": (n, 0.0), "div": (inverse, 0.0)}
        return add_each(recorder, out, "line", input, *lines[what])
    if alpha != 1:
        raise Unsupported(f"{what} with alpha")
    if is_number(input) and not recorder.tracked(input):  # so is n + x, and n / x is n (1 / x)
        n = float(input)
        if what == "div":
            with recorder:
                other, what = other.reciprocal(), "mul"
        lines = {"add": (1.0, n), "sub": (-1.0, n), "mul": (n, 0.0)}
        return add_each(recorder, out, "line", other, *lines[what])
    value, parameter = (input, other) if recorder.tracked(input) else (other, input)
    if what not in ("add", "mul") or not add_plus(recorder, out, what == "mul", value, parameter):
        add_join(recorder, out, what, input, other)
    return None


@handles("rsub", what="sub")
@handles("rdiv", "rtruediv", what="div")
def reversed_arithmetic(recorder, out, input, other, **settings):
    arithmetic(recorder, out, other, input, **settings)


def add_plus(recorder, out, times, input, parameter):
    """Record input + parameter, or their product if `times`, as a layer with this parameter.

    Return False, and record nothing, where that layer cannot do it: the parameter must have a
    number for each number of the input, or for each index of some neighbouring axes, as a bias of
    channels has one for each channel.
    """
    learns = parameter.requires_grad and parameter.is_contiguous()
    if recorder.tracked(parameter) or not learns or recorder.is_shared(parameter):
        return False
    view = recorder.sample_view(input)
    shape, sizes = list(view.shape), list(parameter.shape)
    # the parameter's sizes along the input's axes: 1 where it is broadcast
    sizes = [1] * (len(shape) - len(sizes)) + sizes[max(0, len(sizes) - len(shape)) :]
    axes = [i for i, n in enumerate(sizes) if n != 1]
    first, last = (axes[0], axes[-1] + 1) if axes else (0, 0)
    if tuple(out.shape[1:]) != view.shape or sizes[first:last] != shape[first:last]:
        return False
    count, geometry = parameter.numel(), flat(view.shape)
    recorder.add_layer(
        out, "plus", [Use(view, geometry)], geometry, parameter,
        size=[int(times), math.prod(shape[last:]), count], scratch=count,
        in_place=True, overwrites=not times, keeps=False,
    )  # fmt: skip
    return True


def add_join(recorder, out, what, a, b, otherwise=0.0):
    """Record what one of `JOINS` makes of two values number by number, broadcast to each other.

    "choose" takes a where b is above 0, else the number `otherwise`.
    """
    if any(recorder.tracked(t) and t.dim() != out.dim() for t in (a, b)):
        raise Unsupported(f"{what} of tensors of {a.dim() - 1} and {b.dim() - 1} axes")
    first, second = (recorder.sample_view(t.expand(out.shape)) for t in (a, b))
    same_shape = first.shape == second.shape and first.whole and second.whole
    if what == "add" and same_shape and first.slot is not second.slot and not first.slot.tokens:
        geometry = first.slot.geometry  # the simplest case has a faster layer
        uses = [Use(first, geometry), Use(second, geometry)]
        recorder.add_layer(out, "sum", uses, geometry, in_place=True, overwrites=True, keeps=False)
        return
    shape = tuple(out.shape[1:])

    def fill(x: Any, other: Any, y: Any) -> tuple[list[int], list[int]]:
        steps = [y.plane_step, y.line_step, 1]
        in_y = steps[-len(shape) :] if len(shape) < 4 else dense_strides(shape)
        all_axes = [i for i in range(len(shape)) if shape[i] > 1]
        # Threads share the axes along which no two of them add to the same gradient; along the
        # other axes, each thread computes all.
        with_gradient = [view for view in (first, second) if view.slot.upstream]
        if first == second:  # each thread adds to both in the same places
            with_gradient = with_gradient[:1]
        shared = [i for i in all_axes if all(view.strides[i] for view in with_gradient)]
        if overlap(with_gradient):
            shared = []
        size, table = [JOINS.index(what), first.offset, second.offset], []
        for axes in (shared, [i for i in all_axes if i not in shared]):
            by_axis = shape, in_y, first.strides, second.strides
            counts, *strides = merged(*([numbers[i] for i in axes] for numbers in by_axis))
            size += [len(counts), math.prod(counts)]
            table += [*counts, *itertools.chain(*strides)]
        return size, table

    uses, geometry = [Use(first), Use(second)], geometry_of(shape)
    recorder.add_layer(out, "join", uses, geometry, fill=fill, numbers=(otherwise,))


def merged(shape: Sequence[int], *strides: Sequence[int]) -> list[list[int]]:
    """Return a shape and its strides in several arrays with as few axes as possible.

    Two neighbouring axes become one where they do in each of the arrays.
    """
    axes: list[list[int]] = []
    for n, *step in zip(shape, *strides, strict=True):
        if axes and all(old == n * new for old, new in zip(axes[-1][1:], step, strict=True)):
            axes[-1] = [axes[-1][0] * n, *step]
        else:
            axes.append([n, *step])
    return [[axis[i] for axis in axes] for i in range(1 + len(strides))]


def overlap(views: Sequence[View]) -> bool:
    """Return whether views read a number in two places, other than along an expanded axis."""
    read = defaultdict(list)  # the numbers of each slot that views read, by where they lie
    for view in views:
        numbers = np.array([view.offset])
        for n, step in zip(view.shape, view.strides, strict=True):
            if step:
                numbers = np.add.outer(numbers, step * np.arange(n)).ravel()
        read[view.slot].append(numbers)
    by_slot = map(np.concatenate, read.values())
    return any(len(np.unique(numbers)) < len(numbers) for numbers in by_slot)


def geometry_of(shape: tuple[int, ...]) -> Geometry:
    """Return the geometry of a shape: an image, lines, or a vector."""
    if len(shape) == 3:
        return shape[0], shape[1], shape[2]
    return (1, shape[0], shape[1]) if len(shape) == 2 else flat(shape)


@handles("pow", "square")
@handles("rsqrt", exponent=-0.5)
def power(recorder, out, input, exponent=2):
    if exponent == 2:
        return add_join(recorder, out, "mul", input, input)
    if exponent not in (0.5, -0.5):
        raise Unsupported(f"the power {exponent}")
    if out is input:  # two layers, of which the second would not be where input was
        raise Unsupported(f"the power {exponent} in place")
    with recorder:
        return input.sqrt() if exponent > 0 else input.sqrt().reciprocal()


@handles("where")
def where(recorder, out, condition, input, other):
    if condition.dtype != torch.bool:  # x.where(condition, other) begins with x
        condition, input = input, condition
    if is_number(input) and not recorder.tracked(input):
        with recorder:
            condition, input, other = ~condition, other, input
    if not is_number(other) or not recorder.tracked(input) or input.dtype == torch.bool:
        raise Unsupported("where of two tensors")
    add_join(recorder, out, "choose", input, condition, float(other))


@handles("masked_fill")
def masked_fill(recorder, out, input, mask, value):
    if not is_number(value) or recorder.tracked(value):
        raise Unsupported("masked_fill by a parameter")
    with recorder:
        stays = ~mask
    add_join(recorder, out, "choose", input, stays, float(value))


@handles("contiguous", "clone", "reshape", "flatten")
def copied(recorder, out, input, *shape, **settings):
    """Record a copy in which the numbers lie in the order of the result's axes."""
    view = recorder.sample_view(input, tokens=True)
    if out.shape[0] != TRIAL_SAMPLES:
        raise Unsupported("a view across samples")
    recorder.add(out, move(view, geometry_of(out.shape[1:])))


@handles("expand of a parameter", "repeat of a parameter", "expand_as of a parameter")
def expanded(recorder, out, input, *_, **settings):
    """Record a parameter that gets an axis of samples by this call, such as a class token."""
    if len(out) != TRIAL_SAMPLES or (input.dim() == out.dim() and len(input) == TRIAL_SAMPLES):
        return None
    view = recorder.given_view(input.expand(out.shape))
    copy = out.clone(memory_format=torch.contiguous_format)
    recorder.add(copy, move(view, geometry_of(copy.shape[1:])))
    return copy


@handles("embedding of a parameter")
def rows(recorder, out, input, weight, *_, **settings):
    """Return rows of an embedding of positions as a view of it; None if they are not in order."""
    first, last = int(input.min()), int(input.max()) + 1
    in_order = torch.equal(input.flatten(), torch.arange(first, last))
    return weight[first:last].view_as(out) if in_order else None


@handles("cat", "concat", "concatenate")
def cat(recorder, out, tensors, dim=0):
    """Record parts side by side: each is copied to its own part of one slot."""
    views, dim = [recorder.sample_view(t) for t in tensors], dim % out.dim() - 1
    if dim < 0:
        raise Unsupported("cat of samples")
    planes = dim == 0 and len(views[0].shape) in (2, 3)  # the parts are channels of images

    def geometry(shape: Any) -> Geometry:
        return image(shape) if planes else (math.prod(shape[:dim]), 1, math.prod(shape[dim:]))

    slot = Slot(geometry(tuple(out.shape[1:])), max(view.slot.upstream for view in views))
    start = 0  # the plane or unit where the next part starts
    for view in views:
        size = geometry(view.shape)
        part = (size, start, 0) if planes else (size, 0, start)
        recorder.ops.append(replace(move(view, size), out=slot, part=part))
        start += size[0 if planes else 2]
    recorder.assign(out, slot)


@handles("sum")
@handles("mean", mean=True)
def summed(recorder, out, input, dim=None, *_, mean=False, **settings):
    """Record sums or means over axes."""
    axes = [dim] if isinstance(dim, int) else dim or range(input.dim())
    gone = sorted(axis % input.dim() - 1 for axis in axes)
    view = recorder.sample_view(input)
    if -1 in gone:
        raise Unsupported("a sum over samples")
    if mean and view.whole and len(view.shape) == 3 and gone == [1, 2]:
        c, h, w = view.shape  # means over an image's pixels are a pool of one window
        return add_pool(recorder, out, "mean_pool", input, [0, h, h, 0, w, w], False, (c, 1, 1))
    stays = [i for i in range(len(view.shape)) if i not in gone]
    size, table = [], []
    for part in (stays, gone):  # size and table as join.h says
        counts, strides = merged([view.shape[i] for i in part], [view.strides[i] for i in part])
        number = math.prod(counts)  # in the end, that of the numbers in one sum
        size += [len(counts), number]
        table += [*counts, *strides]
    # where two sums have a number in common, one thread computes all gradients: several would add
    # to the same place
    common = any(view.strides[i] == 0 and view.shape[i] > 1 for i in stays) or overlap([view])
    recorder.add_layer(
        out, "total", [Use(view)], flat(tuple(view.shape[i] for i in stays)),
        size=[*size, view.offset, int(common)], table=table,
        numbers=(1 / number if mean else 1.0,), keeps=False,
    )  # fmt: skip
    return None


@handles("pad")
def pad(recorder, out, input, pad, mode="constant", value=None):
    """Record padding as a `cat` of parts before and after: a number, or copies of lines."""
    if min(pad) < 0 or len(pad) > 2 * (input.dim() - 1):
        raise Unsupported("padding of samples, or by less than 0")
    for i, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        axis = input.dim() - 1 - i
        head, size, tail = input.shape[:axis], input.shape[axis], input.shape[axis + 1 :]
        with recorder:
            if mode == "constant":
                number = torch.tensor(float(value or 0))
                first, last = ([number.expand(*head, n, *tail)] * (n > 0) for n in (before, after))
            else:
                places = np.pad(np.arange(size), (before, after), PADDINGS[mode]).tolist()
                lines = [input.narrow(axis, place, 1) for place in places]
                first, last = lines[:before], lines[before + size :]
            input = torch.cat([*first, input, *last], axis)
    return input


# attention -----------------------------------------------------------------------------------
@handles("matmul", "bmm")
def matmul(recorder, out, input, other):
    """Record products of matrices, `[..., I, K] [..., K, J]` with at most two batch axes."""
    if input.dim() != 3 and other.dim() == 2 and not recorder.tracked(other):
        with recorder:  # recorded as a dense layer
            return (input.reshape(len(input), -1, input.shape[-1]) @ other).view(out.shape)
    batch = TRIAL_SAMPLES, *out.shape[1:-2]
    a, b = (
        recorder.sample_view(t if recorder.tracked(t) else t.expand(*batch, *t.shape[-2:]))
        for t in (input, other)
    )
    axes = len(a.shape)
    if axes != len(b.shape) or not 2 <= axes <= 4 or a.shape[:-2] != b.shape[:-2]:
        raise Unsupported("matmul of tensors of different shapes")
    with_gradient = [view for view in (a, b) if view.slot.upstream]
    repeated = any(
        n > 1 and not step
        for view in with_gradient
        for n, step in zip(view.shape, view.strides, strict=True)
    )
    # where a number is read at several places, one thread adds up its gradient
    common = repeated or overlap(with_gradient)
    missing = 4 - axes  # batch axes
    (i, k), j = a.shape[-2:], b.shape[-1]
    size = [*[1] * missing, *a.shape[:-2], i, j, k, a.offset, b.offset, int(common)]
    table = []
    for strides in (a.strides, b.strides, out.stride()[1:]):
        table += [*[0] * missing, *strides]
    uses, geometry = [Use(a), Use(b)], flat(out.shape[1:])
    recorder.add_layer(out, "product", uses, geometry, size=size, table=table, keeps=False)
    return None


@handles("softmax")
@handles("log_softmax", of="log_softmax")
@handles("safe_softmax", of="safe_softmax")
def softmax(recorder, out, input, dim=None, *_, of="softmax", **settings):
    if dim is None or dim % input.dim() == 0:
        raise Unsupported("softmax over samples, or over an axis that is not named")
    if dim % input.dim() != input.dim() - 1:
        with recorder:
            last = getattr(input.movedim(dim, -1), of)(-1)
            return last.movedim(-1, dim).contiguous()
    view = recorder.sample_view(input)
    geometry = 1, math.prod(view.shape[:-1]), view.shape[-1]
    size = [int(of == "log_softmax"), int(of == "safe_softmax")]
    recorder.add_layer(out, "softmax", [Use(view, geometry)], geometry, size=size, in_place=True)
    return None


@handles("scaled_dot_product_attention")
def attention(
    recorder,
    out,
    query,
    key,
    value,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    **settings,
):
    """Record softmax of the scaled products of queries and keys, times the values."""
    if dropout_p and recorder.dropping is None:
        raise Unsupported("attention with dropout that is no layer")
    factor = scale if scale is not None else 1 / math.sqrt(query.shape[-1])
    with recorder:
        scores = (query @ key.transpose(-1, -2)) * factor
        mask = torch.ones(scores.shape[-2:]).tril() > 0 if is_causal else attn_mask
        if mask is not None and mask.dtype == torch.bool:
            scores = torch.where(mask, scores, -math.inf)
        elif mask is not None:
            scores = scores + mask
        shares = torch._safe_softmax(scores, -1)
        return (recorder.dropout(recorder.dropping, shares) if dropout_p else shares) @ value


@handles("multi_head_attention_forward")
def multi_head(
    recorder,
    out,
    query,
    key,
    value,
    width,
    heads,
    weight,
    bias,
    key_bias,
    value_bias,
    add_zeros,
    dropout,
    out_weight,
    out_bias,
    **settings,
):
    """Record nn.MultiheadAttention, whose samples are its second axis and masks are added."""
    added = key_bias is not None or value_bias is not None or add_zeros
    mask, keys = settings["attn_mask"], settings["key_padding_mask"]
    if added or (mask is not None and mask.dim() > 2):
        raise Unsupported("attention with added keys or a mask for each sample")
    p = dropout if settings["training"] else 0.0
    biases = [None] * 3 if bias is None else bias.chunk(3)
    with recorder:
        inputs = [t.transpose(0, 1) for t in (query, key, value)]
        projected = map(functional.linear, inputs, weight.chunk(3), biases)
        q, k, v = (t.unflatten(-1, (heads, width // heads)).transpose(1, 2) for t in projected)
        if keys is not None:
            keys = keys[:, None, None]
            mask = keys if mask is None else keys + mask
        joint = functional.scaled_dot_product_attention(q, k, v, mask, p).transpose(1, 2).flatten(2)
        return functional.linear(joint, out_weight, out_bias).transpose(0, 1), None


# recurrent layers ----------------------------------------------------------------------------
@handles("lstm", "gru", "rnn_tanh")
def recurrent(
    recorder,
    out,
    input,
    start,
    weights,
    has_biases,
    layers,
    dropout,
    training,
    both_ways,
    batch_first,
):
    """Record layers one after the other, each forward and perhaps backward along the lines.

    For each direction a dense layer multiplies the inputs of all lines by the gates' weights; then
    a layer "recurrent" adds what the state brings, from line to line.
    """
    directions = 1 + both_ways
    tensors_of_direction = len(weights) // (layers * directions)
    constant = [t for t in tensors(start) if not recorder.tracked(t) and not t.requires_grad]
    zeros = [t for t in constant if not t.any()]
    if len(zeros) < len(tensors(start)) or tensors_of_direction != 2 * (1 + has_biases):
        raise Unsupported("a recurrent layer with a first state, or with projections")
    if dropout and training and layers > 1:
        raise Unsupported("a recurrent layer with dropout")
    with recorder:
        y = input if batch_first else input.transpose(0, 1)
    remaining, last_states = iter(weights), []
    for _ in range(layers):
        results = []
        for backward in range(directions):
            of_input, of_state, *biases = itertools.islice(remaining, tensors_of_direction)
            with recorder:
                gates = functional.linear(y, of_input, *biases[:1])
            view, (count, units) = recorder.sample_view(gates), of_state.shape
            # `result` stands for the states: only its shape and its memory's address matter
            result, lines = gates[..., :units].clone(), view.shape[0]
            recorder.add_layer(
                result,
                "recurrent",
                [Use(view, (1, lines, count))],
                (1, lines, units),
                of_state,
                *biases[1:],
                size=[1, 1, backward],
                space=lines * (count + units),
                scratch=2 * units + count * (units + 1),
            )
            results.append(result)
        with recorder:
            last_states += [t[:, :1] if i else t[:, -1:] for i, t in enumerate(results)]
            y = torch.cat(results, 2) if both_ways else results[0]
    with recorder:
        last = torch.cat(last_states, 1) if len(last_states) > 1 else last_states[0]
        last = last.transpose(0, 1)
        y = y if batch_first else y.transpose(0, 1)
    # an LSTM has four gates and a second state, which is not recorded
    return (y, last, None) if len(weights[0]) == 4 * len(weights[1][0]) else (y, last)


# tokens and dropout --------------------------------------------------------------------------
@handles("gt")
@handles("remainder", "mod", remainder=True)
def token(recorder, out, input, other, remainder=False):
    """Record 1.0 where a token is above a number, else 0.0; or its remainder, which is a token."""
    view = recorder.sample_view(input, tokens=True)
    if not view.slot.tokens or not view.whole or not isinstance(other, int):
        raise Unsupported("a comparison or remainder of other than tokens")
    geometry = view.slot.geometry
    uses, slot = [Use(view, geometry)], Slot(geometry, 0, tokens=remainder)
    below = other if remainder else 0
    recorder.add(out, Op("token", uses, slot, [int(remainder), other], below=below))


@handles("ne")
def differs(recorder, out, input, other):
    if other != 0:
        raise Unsupported("a comparison with another token than 0")
    token(recorder, out, input, 0)  # a token that is not 0 is above 0


@handles("eq")
def equals(recorder, out, input, other):
    with recorder:
        return ~(input != other)


@handles("float", "to", "type")
def cast(recorder, out, input, *_, **settings):
    """Record yes and no as 1 and 0, which they already are."""
    view = recorder.sample_view(input, tokens=True)
    if view.slot.tokens or not out.is_floating_point() or input.dtype.is_floating_point:
        raise Unsupported("a cast")
    recorder.add(out, move(view, geometry_of(view.shape)))


@handles("embedding")
def embedding(
    recorder, out, input, weight, *, padding_idx, max_norm, scale_grad_by_freq, **settings
):
    view = recorder.sample_view(input, tokens=True)
    if max_norm is not None or scale_grad_by_freq or not view.slot.tokens:
        raise Unsupported("an embedding of numbers, with max_norm or scale_grad_by_freq")
    lines, (rows, width) = math.prod(view.shape), weight.shape
    # Tokens that an op made must be known to lie below `rows`. Those of the sample itself, which
    # no op made, are compared with `Plan.vocabulary` when the samples are known.
    makers = [op for op in recorder.ops if op.out is view.slot]
    if not view.whole or any(not 0 < op.below <= rows for op in makers):
        raise Unsupported(f"an embedding of {rows} rows, which tokens may exceed")
    size = [rows, -1 if padding_idx is None else padding_idx % rows]
    uses, geometry = [Use(view, (1, 1, lines))], (1, lines, width)
    recorder.add_layer(out, "embed", uses, geometry, weight, size=size, keeps=False)


@handles("dropout")
def dropout(recorder, out, input, *_, **settings):
    """Record the dropout of `recorder.dropping`, a keyed layer, while it trains."""
    layer, view = recorder.dropping, recorder.sample_view(input)
    if layer is None:
        raise Unsupported("dropout that is no layer")
    shape, recorder.dropping = view.shape, None
    numbers_per_draw = math.prod(shape[len(shape) - layer.shared_axes(input) :])
    recorder.drops += 1
    geometry = flat(shape)
    recorder.add_layer(
        out, "drop", [Use(view, geometry)], geometry,
        size=[recorder.drops, numbers_per_draw, math.ceil(layer.p * 2**BITS)],
        numbers=(1 / (1 - layer.p) if layer.p < 1 else 0.0,),
        space=math.prod(shape) // numbers_per_draw, in_place=True, overwrites=True, keeps=False,
    )  # fmt: skip
