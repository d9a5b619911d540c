"""Translate PyTorch's operations on several values into the kernels' layers.

These are sums, products, parts, attention, tokens, dropout. Each function is called with the
recorder r, the result that PyTorch computed, and the arguments of the call, as in `layers`.
"""

import functools
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
from dpfl_mpi.numerics.lanes.layers import HANDLERS, each, flat, handles, pool
from dpfl_mpi.numerics.lanes.trace import (
    Geometry,
    Op,
    S,
    Slot,
    Unknown,
    Use,
    View,
    image,
    move,
    tensors,
)

# how NumPy names ways of padding
PADDINGS: dict[str, Any] = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}
JOINS = ("add", "sub", "mul", "div", "choose")  # in the order of join.h
KNOWN = HANDLERS  # the functions of this file and of layers.py


# sums, products, parts -----------------------------------------------------------------------
def is_number(value: Any) -> bool:
    """Return whether a call's argument is a constant scalar."""
    constant = isinstance(value, Tensor) and value.dim() == 0 and not value.requires_grad
    return isinstance(value, int | float) or constant


@handles("add", "radd", "iadd")
def joined(r, out, input, other, *, alpha=1, what="add"):
    """Record a sum or product of two values, or of a value and numbers or parameters."""
    if what == "add" and out.dtype == torch.bool:
        raise Unknown("add of yes and no")
    if is_number(other) and not r.tracked(other):
        n = float(other) * alpha
        inverse = 1 / n if n else math.inf
        lines = {"add": (1.0, n), "sub": (1.0, -n), "mul": (n, 0.0), "div": (inverse, 0.0)}
        each(r, out, "line", input, *lines[what])
    elif is_number(input) and not r.tracked(input):
        if alpha != 1:
            raise Unknown(f"{what} with alpha")
        n = float(input)
        if what == "div":
            with r:
                other, what = other.reciprocal(), "mul"
        lines = {"add": (1.0, n), "sub": (-1.0, n), "mul": (n, 0.0)}
        each(r, out, "line", other, *lines[what])
    elif alpha != 1:
        raise Unknown(f"{what} with alpha")
    else:
        parts = (input, other) if r.tracked(input) else (other, input)
        if what not in ("add", "mul") or not with_parameter(r, out, what == "mul", *parts):
            both(r, out, what, input, other)


handles("sub", "isub", "subtract")(functools.partial(joined, what="sub"))
handles("mul", "rmul", "imul", "multiply")(functools.partial(joined, what="mul"))
handles("div", "truediv", "true_divide", "itruediv", "divide")(
    functools.partial(joined, what="div")
)


@handles("rsub")
def reversed_difference(r, out, input, other, *, alpha=1, what="sub"):
    joined(r, out, other, input, alpha=alpha, what=what)


handles("rdiv", "rtruediv")(functools.partial(reversed_difference, what="div"))


def with_parameter(r, out, times, input, parameter):
    """Return whether a parameter that is added or multiplied was recorded as a layer's own.

    It has a number for each number, or for each of the first axes or of the last.
    """
    if r.tracked(parameter) or not parameter.requires_grad or r.is_shared(parameter):
        return False
    view = r.leading(input)
    shape, own = list(view.shape), list(parameter.shape)
    own = [1] * (len(shape) - len(own)) + own[max(0, len(own) - len(shape)) :]
    long = [i for i, n in enumerate(own) if n != 1]
    first, last = (long[0], long[-1] + 1) if long else (0, 0)
    fits = tuple(out.shape[1:]) == view.shape and own[first:last] == shape[first:last]
    if not fits or not parameter.is_contiguous():
        return False
    count, made = parameter.numel(), flat(view.shape)
    r.layer(
        out, "plus", [Use(view, made)], made, parameter,
        size=[int(times), math.prod(shape[last:]), count], scratch=count,
        in_place=True, overwrites=not times, keeps=False,
    )  # fmt: skip
    return True


def both(r, out, what, a, b, otherwise=0.0):
    """Record what is made of two values number by number, where shapes differ by strides."""
    if any(r.tracked(t) and t.dim() != out.dim() for t in (a, b)):
        raise Unknown(f"{what} of tensors of {a.dim() - 1} and {b.dim() - 1} axes")
    first, second = r.leading(a.expand(out.shape)), r.leading(b.expand(out.shape))
    same = first.shape == second.shape and first.whole and second.whole
    if what == "add" and same and first.slot is not second.slot and not first.slot.tokens:
        geometry = first.slot.geometry
        uses = [Use(first, geometry), Use(second, geometry)]
        r.layer(out, "sum", uses, geometry, in_place=True, overwrites=True, keeps=False)
        return
    views, shape = (first, second), tuple(out.shape[1:])

    def fill(x: Any, other: Any, y: Any) -> tuple[list[int], list[int]]:
        in_y = [y.plane, y.line, 1][-len(shape) :] if len(shape) < 4 else dense(shape)
        axes = [i for i in range(len(shape)) if shape[i] > 1]
        learn = [view for view in views if view.slot.upstream]
        # one number that is read twice, at the same place of the output, has one member
        both_same = first.strides == second.strides and first.offset == second.offset
        same = first.slot is second.slot and both_same
        shared = [i for i in axes if all(view.strides[i] for view in learn)]
        if have_in_common(learn[:1] if same else learn):
            shared = []
        size, table = [JOINS.index(what), first.offset, second.offset], []
        for part in (shared, [i for i in axes if i not in shared]):
            all_of = shape, in_y, first.strides, second.strides
            numbers, *steps = merged(*([of[i] for i in part] for of in all_of))
            size += [len(numbers), math.prod(numbers)]
            table += [*numbers, *itertools.chain(*steps)]
        return size, table

    r.layer(out, "join", [Use(first), Use(second)], natural(shape), fill=fill, numbers=(otherwise,))


def dense(shape: Sequence[int]) -> list[int]:
    """Return the steps of numbers that lie one after the other."""
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


def merged(shape: Sequence[int], *steps: Sequence[int]) -> list[list[int]]:
    """Return the same numbers in as few axes as possible: how many in each, then their steps."""
    out: list[list[int]] = []
    for n, *step in zip(shape, *steps, strict=True):
        if out and all(old == n * new for old, new in zip(out[-1][1:], step, strict=True)):
            out[-1] = [out[-1][0] * n, *step]
        else:
            out.append([n, *step])
    return [list(part) for part in zip(*out, strict=True)] if out else [[] for _ in (0, *steps)]


def have_in_common(views: Sequence[View]) -> bool:
    """Return whether a number is in two places of views, where they are not expanded."""
    found = defaultdict(list)
    for view in views:
        places = np.array([view.offset])
        for n, step in zip(view.shape, view.strides, strict=True):
            if step:
                places = np.add.outer(places, step * np.arange(n)).ravel()
        found[view.slot].append(places)
    joint = map(np.concatenate, found.values())
    return any(len(np.unique(places)) < len(places) for places in joint)


def natural(shape: tuple[int, ...]) -> Geometry:
    """Return the geometry of a shape: an image, lines, or a vector."""
    if len(shape) == 3:
        return shape[0], shape[1], shape[2]
    return (1, shape[0], shape[1]) if len(shape) == 2 else flat(shape)


@handles("pow", "square")
def power(r, out, input, exponent=2):
    if exponent == 2:
        return both(r, out, "mul", input, input)
    if exponent not in (0.5, -0.5):
        raise Unknown(f"the power {exponent}")
    with r:
        return input.sqrt() if exponent > 0 else input.sqrt().reciprocal()


handles("rsqrt")(functools.partial(power, exponent=-0.5))


@handles("where")
def where(r, out, condition, input, other):
    # x.where(condition, other) comes in this order, too
    if is_number(input) and not r.tracked(input):
        with r:
            condition, input, other = ~condition, other, input
    if not is_number(other) or not r.tracked(input) or input.dtype == torch.bool:
        raise Unknown("where of two tensors")
    both(r, out, "choose", input, condition, float(other))


@handles("masked_fill")
def masked_fill(r, out, input, mask, value):
    with r:
        here = ~mask
    both(r, out, "choose", input, here, float(value))


@handles("contiguous", "clone", "reshape", "flatten")
def moved(r, out, input, *shape, **settings):
    """Record numbers that are brought into the order of their axes."""
    view = r.leading(input, tokens=True)
    if out.shape[0] != S:
        raise Unknown("a view across samples")
    r.record(out, move(view, natural(out.shape[1:])))


@handles("expand of a parameter", "repeat of a parameter", "expand_as of a parameter")
def expanded(r, out, input, *_, **settings):
    """Record a parameter that has an axis of samples from here on, such as a class token."""
    if len(out) != S or (input.dim() == out.dim() and len(input) == S):
        return None
    view = r.same(input.expand(out.shape))
    copy = out.clone(memory_format=torch.contiguous_format)
    r.record(copy, move(view, natural(copy.shape[1:])))
    return copy


@handles("embedding of a parameter")
def rows(r, out, input, weight, *_, **settings):
    """Return the rows of places one after the other as a part of the parameter."""
    first, last = int(input.min()), int(input.max()) + 1
    in_order = torch.equal(input.flatten(), torch.arange(first, last))
    return weight[first:last].view_as(out) if in_order else None


@handles("cat", "concat", "concatenate")
def cat(r, out, tensors, dim=0):
    """Record parts side by side: channels of images, else along any axis but the samples'."""
    views, dim = [r.leading(t) for t in tensors], dim % out.dim() - 1
    if dim < 0:
        raise Unknown("cat of samples")
    planes = dim == 0 and len(views[0].shape) in (2, 3)

    def geometry(shape: Any) -> Geometry:
        return image(shape) if planes else (math.prod(shape[:dim]), 1, math.prod(shape[dim:]))

    slot = Slot(geometry(tuple(out.shape[1:])), max(view.slot.upstream for view in views))
    at = 0
    for view in views:
        own = geometry(view.shape)
        part = (own, at, 0) if planes else (own, 0, at)
        r.ops.append(replace(move(view, own), out=slot, part=part))
        at += own[0 if planes else 2]
    r.assign(out, slot)


@handles("sum")
def summed(r, out, input, dim=None, *_, mean=False, **settings):
    """Record sums or means over axes; those of an image over its pixels are a pool."""
    axes = [dim] if isinstance(dim, int) else dim or range(input.dim())
    gone = sorted(axis % input.dim() - 1 for axis in axes)
    view = r.leading(input)
    if -1 in gone:
        raise Unknown("a sum over samples")
    if mean and view.whole and len(view.shape) == 3 and gone == [1, 2]:
        c, h, w = view.shape
        pool(r, out, "mean_pool", input, [0, h, h, 0, w, w], made=(c, 1, 1))
        return
    stays = [i for i in range(len(view.shape)) if i not in gone]
    groups = stays, gone
    size, table = [], []
    for axes in groups:
        numbers, steps = merged(*([of[i] for i in axes] for of in (view.shape, view.strides)))
        size += [len(numbers), math.prod(numbers)]
        table += [*numbers, *steps]
    expanded = any(view.strides[i] == 0 and view.shape[i] > 1 for i in stays)
    count = size[3]
    r.layer(
        out, "total", [Use(view)], flat(tuple(view.shape[i] for i in stays)),
        size=[*size, view.offset, int(expanded or have_in_common([view]))], table=table,
        numbers=(1 / count if mean else 1.0,), keeps=False,
    )  # fmt: skip


handles("mean")(functools.partial(summed, mean=True))


# attention -----------------------------------------------------------------------------------
@handles("pad")
def pad(r, out, input, pad, mode="constant", value=None):
    """Record lines beside others: of a number, or of copies."""
    if min(pad) < 0 or len(pad) > 2 * (input.dim() - 1):
        raise Unknown("padding of samples, or by less than 0")
    for i, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        axis = input.dim() - 1 - i
        head, size, tail = input.shape[:axis], input.shape[axis], input.shape[axis + 1 :]
        with r:
            if mode == "constant":
                number = torch.tensor(float(value or 0))
                first, last = ([number.expand(*head, n, *tail)] * (n > 0) for n in (before, after))
            else:
                places = np.pad(np.arange(size), (before, after), PADDINGS[mode]).tolist()
                lines = [input.narrow(axis, place, 1) for place in places]
                first, last = lines[:before], lines[before + size :]
            input = torch.cat([*first, input, *last], axis)
    return input


@handles("matmul", "bmm")
def matmul(r, out, input, other):
    """Record products of matrices, `[..., I, K] [..., K, J]` with at most two batch axes."""
    if input.dim() != 3 and other.dim() == 2 and not r.tracked(other):
        with r:  # recorded as a dense layer
            return (input.reshape(len(input), -1, input.shape[-1]) @ other).view(out.shape)
    axes_before = S, *out.shape[1:-2]
    alike = (t if r.tracked(t) else t.expand(*axes_before, *t.shape[-2:]) for t in (input, other))
    a, b = map(r.leading, alike)
    axes = len(a.shape)
    if axes != len(b.shape) or not 2 <= axes <= 4 or a.shape[:-2] != b.shape[:-2]:
        raise Unknown("matmul of tensors of different shapes")
    (i, k), j = a.shape[-2:], b.shape[-1]
    missing = 4 - axes
    with_gradient = [view for view in (a, b) if view.slot.upstream]
    steps_of = (zip(v.shape, v.strides, strict=True) for v in with_gradient)
    expanded = any(n > 1 and not step for axes in steps_of for n, step in axes)
    # where a number is read at several places, one member of the team adds up its gradients
    overlap = expanded or have_in_common(with_gradient)
    size = [*[1] * missing, *a.shape[:-2], i, j, k, a.offset, b.offset, int(overlap)]
    strides = a.strides, b.strides, out.stride()[1:]
    table = [step for steps in strides for step in (*[0] * missing, *steps)]
    uses = [Use(a), Use(b)]
    r.layer(out, "product", uses, flat(out.shape[1:]), size=size, table=table, keeps=False)
    return None


@handles("softmax")
def softmax(r, out, input, dim=None, *_, of="softmax", **settings):
    if dim is None or dim % input.dim() == 0:
        raise Unknown("softmax over samples, or over an axis that is not named")
    if dim % input.dim() != input.dim() - 1:
        with r:
            last = getattr(input.movedim(dim, -1), of)(-1)
            return last.movedim(-1, dim).contiguous()
    view = r.leading(input)
    made = 1, math.prod(view.shape[:-1]), view.shape[-1]
    size = [int(of == "log_softmax")]
    r.layer(out, "softmax", [Use(view, made)], made, size=size, in_place=True)
    return None


handles("log_softmax")(functools.partial(softmax, of="log_softmax"))


@handles("scaled_dot_product_attention")
def attention(
    r, out, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
    **settings,
):  # fmt: skip
    """Record softmax of the scaled products of queries and keys, times the values."""
    if dropout_p and r.dropping is None:
        raise Unknown("attention with dropout that is no layer")
    factor = scale if scale is not None else 1 / math.sqrt(query.shape[-1])
    with r:
        scores = (query @ key.transpose(-1, -2)) * factor
        mask = torch.ones(scores.shape[-2:]).tril() > 0 if is_causal else attn_mask
        if mask is not None and mask.dtype == torch.bool:
            scores = torch.where(mask, scores, -math.inf)
        elif mask is not None:
            scores = scores + mask
        shares = scores.softmax(-1)
        return (r.dropout(r.dropping, shares) if dropout_p else shares) @ value


@handles("multi_head_attention_forward")
def multi_head(
    r, out, query, key, value, width, heads, weight, bias, key_bias, value_bias, add_zeros, dropout,
    out_weight, out_bias, **settings,
):  # fmt: skip
    """Record nn.MultiheadAttention, whose samples are its second axis and masks are added."""
    added = key_bias is not None or value_bias is not None or add_zeros
    mask, keys = settings["attn_mask"], settings["key_padding_mask"]
    of_samples = mask is not None and mask.dim() > 2
    if added or of_samples:
        raise Unknown("attention with added keys or a mask for each sample")
    p = dropout if settings["training"] else 0.0
    biases = [None] * 3 if bias is None else bias.chunk(3)
    with r:
        inputs = [t.transpose(0, 1) for t in (query, key, value)]
        made = map(functional.linear, inputs, weight.chunk(3), biases)
        q, k, v = (t.unflatten(-1, (heads, width // heads)).transpose(1, 2) for t in made)
        if keys is not None:
            keys = keys[:, None, None]
            mask = keys if mask is None else keys + mask
        joint = functional.scaled_dot_product_attention(q, k, v, mask, p).transpose(1, 2).flatten(2)
        return functional.linear(joint, out_weight, out_bias).transpose(0, 1), None


# recurrent layers ----------------------------------------------------------------------------
@handles("lstm", "gru", "rnn_tanh")
def recurrent(
    r, out, input, start, weights, has_biases, layers, dropout, training, both_ways, batch_first
):
    """Record layers one after the other, each forward and perhaps backward along the lines."""
    directions = 1 + both_ways
    each = len(weights) // (layers * directions)
    zeros = [t for t in tensors(start) if not r.tracked(t) and not t.any()]
    if len(zeros) < len(tensors(start)) or each != 2 * (1 + has_biases):
        raise Unknown("a recurrent layer with a first state, or with projections")
    if dropout and training and layers > 1:
        raise Unknown("a recurrent layer with dropout")
    with r:
        y = input if batch_first else input.transpose(0, 1)
    ends = []
    for first in range(0, len(weights), each * directions):
        parts = []
        for i in range(directions):
            of_input, of_state, *biases = weights[first + i * each : first + (i + 1) * each]
            with r:
                gates = functional.linear(y, of_input, *biases[:1])
            view, (count, units) = r.leading(gates), of_state.shape
            made, lines = gates[..., :units].clone(), view.shape[0]
            r.layer(
                made, "recurrent", [Use(view, (1, lines, count))], (1, lines, units), of_state,
                *biases[1:], size=[1, 1, i], space=lines * (count + units),
                scratch=2 * units + count * (units + 1),
            )  # fmt: skip
            parts.append(made)
        with r:
            ends += [part[:, :1] if i else part[:, -1:] for i, part in enumerate(parts)]
            y = torch.cat(parts, 2) if both_ways else parts[0]
    with r:
        last = (torch.cat(ends, 1) if len(ends) > 1 else ends[0]).transpose(0, 1)
        y = y if batch_first else y.transpose(0, 1)
    return (y, last, None) if len(weights[0]) == 4 * len(weights[1][0]) else (y, last)


# tokens and dropout --------------------------------------------------------------------------
@handles("gt")
def token(r, out, input, other, remainder=False):
    """Record 1.0 where a token is above a number, else 0.0; or its remainder, which is a token."""
    view = r.leading(input, tokens=True)
    if not view.slot.tokens or not view.whole or not isinstance(other, int):
        raise Unknown("a comparison or remainder of other than tokens")
    geometry = view.slot.geometry
    made = Slot(geometry, 0, remainder)
    below = other if remainder else 0
    r.record(out, Op("token", [Use(view, geometry)], made, [int(remainder), other], below=below))


handles("remainder", "mod")(functools.partial(token, remainder=True))


@handles("ne")
def differs(r, out, input, other):
    """Record 1.0 where a token is not 0: none is below."""
    if other != 0:
        raise Unknown("a comparison with another token than 0")
    token(r, out, input, 0)


@handles("eq")
def equals(r, out, input, other):
    with r:
        return ~(input != other)


@handles("float", "to", "type")
def cast(r, out, input, *_, **settings):
    """Record yes and no as 1 and 0, which they already are."""
    view = r.leading(input, tokens=True)
    if view.slot.tokens or not out.is_floating_point() or input.dtype.is_floating_point:
        raise Unknown("a cast")
    r.record(out, move(view, natural(view.shape)))


@handles("embedding")
def embedding(r, out, input, weight, *, padding_idx, max_norm, scale_grad_by_freq, **settings):
    view = r.leading(input, tokens=True)
    if max_norm is not None or scale_grad_by_freq or not view.slot.tokens:
        raise Unknown("an embedding of numbers, with max_norm or scale_grad_by_freq")
    lines, (rows, width) = math.prod(view.shape), weight.shape
    # tokens of the sample itself, which no op makes, are checked by `Plan.vocabulary`
    below = [op.below or rows + 1 for op in r.ops if op.out is view.slot]
    if not view.whole or any(n > rows for n in below):
        raise Unknown(f"an embedding of {rows} rows, which tokens may exceed")
    size = [rows, -1 if padding_idx is None else padding_idx % rows]
    uses = [Use(view, (1, 1, lines))]
    r.layer(out, "embed", uses, (1, lines, width), weight, size=size, keeps=False)


@handles("dropout")
def dropout(r, out, input, *_, **settings):
    """Record a keyed layer: nn.Dropout and the like, while they train."""
    layer, view = r.dropping, r.leading(input)
    if layer is None:
        raise Unknown("dropout that is no layer")
    shape, r.dropping = view.shape, None
    share = math.prod(shape[len(shape) - layer.shared_axes(input) :])
    r.drops += 1
    made = flat(shape)
    r.layer(
        out, "drop", [Use(view, made)], made,
        size=[r.drops, share, math.ceil(layer.p * 2**BITS)],
        numbers=(1 / (1 - layer.p) if layer.p < 1 else 0.0,), space=math.prod(shape) // share,
        in_place=True, overwrites=True, keeps=False,
    )  # fmt: skip
