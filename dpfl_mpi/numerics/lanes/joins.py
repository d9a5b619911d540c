"""What a call of PyTorch that joins values becomes (as `layers`, which see): sums and products, parts side by side, attention, tokens, dropout."""

import functools
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dpfl_mpi.numerics.dropout import BITS
from dpfl_mpi.numerics.lanes.layers import HANDLERS, each, flat, handles
from dpfl_mpi.numerics.lanes.trace import Geometry, Op, Recorder, S, Slot, Unknown, Use, image, move


# sums, products, parts ----------------------------------------------------------------------------------------------------------------
def is_number(value: Any) -> bool:
    """Return whether a call's argument is one number, which does not learn."""
    return isinstance(value, int | float) or (
        isinstance(value, Tensor) and value.dim() == 0 and not value.requires_grad
    )


JOINS = ("add", "sub", "mul", "div", "choose")  # in the order of join.h


@handles("add", "radd", "iadd")
def joined(r: Recorder, out: Tensor, input: Any, other: Any, *, alpha: float = 1, what: str = "add") -> None:
    """Two values, or a value and numbers or parameters."""
    if what == "add" and out.dtype == torch.bool:
        raise Unknown(f"{what} of yes and no{r.place()}")
    if is_number(other) and not r.tracked(other):
        n = float(other) * alpha
        lines = {"add": (1.0, n), "sub": (1.0, -n), "mul": (n, 0.0), "div": (1 / n if n else math.inf, 0.0)}
        return each(r, out, "line", input, *lines[what])
    if is_number(input) and not r.tracked(input):
        if what == "div" or alpha != 1:
            raise Unknown(f"a number over a tensor{r.place()}")
        n = float(input)
        return each(r, out, "line", other, *{"add": (1.0, n), "sub": (-1.0, n), "mul": (n, 0.0)}[what])
    if alpha != 1:
        raise Unknown(f"{what} with alpha{r.place()}")
    if r.tracked(input) and r.tracked(other):
        return both(r, out, what, input, other)
    sample, parameter = (input, other) if r.tracked(input) else (other, input)
    if what not in ("add", "mul"):
        raise Unknown(f"{what} of a parameter{r.place()}")
    plus(r, out, what == "mul", sample, parameter)


handles("sub", "isub", "subtract")(functools.partial(joined, what="sub"))
handles("mul", "rmul", "imul", "multiply")(functools.partial(joined, what="mul"))
handles("div", "truediv", "true_divide", "itruediv", "divide")(functools.partial(joined, what="div"))
handles("rsub")(lambda r, out, input, other, *, alpha=1: joined(r, out, other, input, alpha=alpha, what="sub"))


def plus(r: Recorder, out: Tensor, times: bool, input: Tensor, parameter: Tensor) -> None:
    """A parameter for each number, or each of the first axis, or each of the last axes, added or multiplied."""
    view = r.leading(input)
    shape, own = list(view.shape), list(parameter.shape)
    own = [1] * (len(shape) - len(own)) + own if len(own) <= len(shape) else own[len(own) - len(shape) :]
    kept = [i for i, n in enumerate(own) if n != 1]
    first, last = (kept[0], kept[-1]) if kept else (0, 0)
    if tuple(out.shape[1:]) != view.shape or (kept and own[first : last + 1] != shape[first : last + 1]):
        raise Unknown(f"a parameter of the shape {tuple(parameter.shape)} at a tensor {shape}{r.place()}")
    share = math.prod(shape[last + 1 :]) if kept else math.prod(shape)
    all, made = parameter.numel(), flat(view.shape)
    how: dict[str, Any] = {"size": [int(times), share, all], "scratch": all, "in_place": True, "overwrites": not times}
    r.layer(out, "plus", [Use(view, made)], made, parameter, **how, keeps=False)


def both(r: Recorder, out: Tensor, what: str, a: Tensor, b: Tensor, otherwise: float = 0.0) -> None:
    """Two values number by number; of one alone, or of different shapes, by strides."""
    first, second = r.leading(a), r.leading(b)
    same = first.shape == second.shape and first.whole and second.whole and first.slot is not second.slot
    if what == "add" and same and not first.slot.tokens:
        geometry = first.slot.geometry
        uses = [Use(first, geometry), Use(second, geometry)]
        return r.layer(out, "sum", uses, geometry, in_place=True, overwrites=True, keeps=False)
    wide_a, wide_b = (r.leading(t.expand(out.shape)) if t.dim() == out.dim() else None for t in (a, b))
    if wide_a is None or wide_b is None:
        raise Unknown(f"{what} of tensors of {a.dim() - 1} and {b.dim() - 1} axes{r.place()}")
    shape = tuple(out.shape[1:])
    size = [len(shape), JOINS.index(what), wide_a.offset, wide_b.offset]
    table = [*shape, *wide_a.strides, *wide_b.strides]
    uses = [Use(wide_a), Use(wide_b)]
    r.layer(out, "join", uses, natural(shape), size=size, table=table, numbers=(otherwise,))


def natural(shape: tuple[int, ...]) -> Geometry:
    """Return the geometry of a shape: an image, lines, or a vector."""
    if len(shape) == 3:
        return shape[0], shape[1], shape[2]
    return (1, *shape) if len(shape) == 2 else flat(shape)  # type: ignore[return-value]


@handles("where")
def where(r: Recorder, out: Tensor, condition: Tensor, input: Any, other: Any) -> None:
    if not is_number(other) or not r.tracked(input) or input.dtype == torch.bool:  # x.where(condition, other)
        raise Unknown(f"where of two tensors{r.place()}")
    both(r, out, "choose", input, condition, float(other))


@handles("contiguous", "clone", "reshape", "flatten")
def moved(r: Recorder, out: Tensor, input: Tensor, *shape: Any, **more: Any) -> None:
    """Numbers that are brought into the order of their axes."""
    view = r.leading(input, True)
    if out.shape[0] != S:
        raise Unknown(f"a view across samples{r.place()}")
    r.record(out, move(view, natural(tuple(out.shape[1:]))))


@handles("cat", "concat", "concatenate")
def cat(r: Recorder, out: Tensor, tensors: Any, dim: int = 0) -> None:
    """Parts side by side: of images channels, else along any axis but the samples'."""
    views, dim = [r.leading(t) for t in tensors], dim % out.dim() - 1
    if dim < 0:
        raise Unknown(f"cat of samples{r.place()}")
    planes = dim == 0 and len(views[0].shape) in (2, 3)
    outer = math.prod(views[0].shape[:dim])
    shape = tuple(out.shape[1:])
    slot = Slot(image(shape) if planes else (outer, 1, math.prod(shape[dim:])), max(v.slot.upstream for v in views))
    at = 0
    for view in views:
        own = image(view.shape) if planes else (outer, 1, math.prod(view.shape[dim:]))
        r.ops.append(replace(move(view, own), out=slot, part=(own, at, 0) if planes else (own, 0, at)))
        at += own[0 if planes else 2]
    r.keep(out, slot)


@handles("sum")
def summed(r: Recorder, out: Tensor, input: Tensor, dim: Any = None, *_: Any, mean: bool = False, **more: Any) -> None:
    """Sums or means over axes; those of an image over its pixels are a pool."""
    axes = sorted(d % input.dim() for d in ([dim] if isinstance(dim, int) else dim or range(input.dim())))
    view = r.leading(input)
    if 0 in axes:
        raise Unknown(f"a sum over samples{r.place()}")
    if mean and view.whole and len(view.shape) == 3 and axes == [2, 3]:
        c, h, w = view.shape
        return r.layer(out, "mean_pool", [Use(view, (c, h, w))], (c, 1, 1), table=[0, h, h, 0, w, w], keeps=False)
    gone = [a - 1 for a in axes]
    stays = [i for i in range(len(view.shape)) if i not in gone]
    table = [part[i] for dimensions in (stays, gone) for part in (view.shape, view.strides) for i in dimensions]
    count = math.prod(view.shape[i] for i in gone)
    size, numbers = [len(stays), len(gone), count, view.offset], (1 / count if mean else 1.0,)
    made = flat(tuple(view.shape[i] for i in stays))
    r.layer(out, "total", [Use(view)], made, size=size, table=table, numbers=numbers, keeps=False)


handles("mean")(functools.partial(summed, mean=True))


# attention ----------------------------------------------------------------------------------------------------------------------------
@handles("matmul", "bmm")
def matmul(r: Recorder, out: Tensor, input: Tensor, other: Tensor) -> None:
    """Products of matrices of the sample, `[..., I, K] [..., K, J]` with up to two axes before."""
    if not r.tracked(other):
        raise Unknown(f"matmul with a parameter{r.place()}; nn.Linear is known")
    a, b = r.leading(input), r.leading(other)
    if len(a.shape) != len(b.shape) or not 2 <= len(a.shape) <= 4 or a.shape[:-2] != b.shape[:-2]:
        raise Unknown(f"matmul of tensors of different shapes{r.place()}")
    batch = [1] * (4 - len(a.shape)) + list(a.shape[:-2])
    (i, k), j = a.shape[-2:], b.shape[-1]
    steps = [[0] * (4 - len(strides)) + list(strides) for strides in (a.strides, b.strides, out.stride()[1:])]
    size, table = [*batch, i, j, k, a.offset, b.offset], [n for step in steps for n in step]
    r.layer(out, "product", [Use(a), Use(b)], flat(out.shape[1:]), size=size, table=table, keeps=False)


@handles("softmax")
def softmax(r: Recorder, out: Tensor, input: Tensor, dim: int | None = None, *_: Any, **more: Any) -> Tensor | None:
    if dim is None or dim % input.dim() == 0:
        raise Unknown(f"softmax over samples, or over an axis that is not named{r.place()}")
    if dim % input.dim() != input.dim() - 1:
        with r:
            return input.movedim(dim, -1).softmax(-1).movedim(-1, dim).contiguous()
    view = r.leading(input)
    made = 1, math.prod(view.shape[:-1]), view.shape[-1]
    r.layer(out, "softmax", [Use(view, made)], made, in_place=True)
    return None


@handles("scaled_dot_product_attention")
def attention(
    r: Recorder, out: Tensor, query: Tensor, key: Tensor, value: Tensor, *masks: Any, scale: Any = None, **more: Any
) -> Tensor:
    """Softmax of the scaled products of queries and keys, times the values."""
    named = (more.get(name) for name in ("attn_mask", "dropout_p", "is_causal"))
    if any(isinstance(mask, Tensor) or mask for mask in (*masks, *named)):
        raise Unknown(f"attention with a mask or dropout{r.place()}")
    factor = scale if scale is not None else 1 / math.sqrt(query.shape[-1])
    with r:
        return ((query @ key.transpose(-1, -2)) * factor).softmax(-1) @ value


@handles("multi_head_attention_forward")
def multi_head(
    r: Recorder, out: Tensor, query: Tensor, key: Tensor, value: Tensor, width: int, heads: int, *rest: Any, **more: Any
) -> tuple[Tensor, None]:
    """nn.MultiheadAttention, whose samples are its second axis; rest: weight and bias of the first layer, added keys and values (3), dropout, those of the last layer."""
    weight, bias, *added, share, out_weight, out_bias = rest
    masked = any(more[name] is not None for name in ("key_padding_mask", "attn_mask"))
    if any(added) or masked or (share and more["training"]):
        raise Unknown(f"attention with a mask, dropout or added keys{r.place()}")
    inputs, biases = (query, key, value), [None] * 3 if bias is None else bias.chunk(3)
    with r:
        made = map(functional.linear, (t.transpose(0, 1) for t in inputs), weight.chunk(3), biases)
        split = [t.unflatten(-1, (heads, width // heads)).transpose(1, 2) for t in made]
        joint = functional.scaled_dot_product_attention(*split).transpose(1, 2).flatten(2)
        return functional.linear(joint, out_weight, out_bias).transpose(0, 1), None


# tokens and dropout ---------------------------------------------------------------------------------------------------------------------
@handles("gt")
def token(r: Recorder, out: Tensor, input: Tensor, other: Any, what: int = 0) -> None:
    """1.0 where a token is above a number, else 0.0; where `what` is 1 its remainder, which is a token."""
    view = r.leading(input, True)
    if not view.slot.tokens or not view.whole or not isinstance(other, int):
        raise Unknown(f"a comparison or remainder of other than tokens{r.place()}")
    use = Use(view, view.slot.geometry)
    facts = {"below": other} if what else {}
    r.record(out, Op("token", [use], Slot(view.slot.geometry, 0, bool(what)), [what, other], facts=facts))


handles("remainder", "mod")(functools.partial(token, what=1))


@handles("ne")
def differs(r: Recorder, out: Tensor, input: Tensor, other: Any) -> None:
    """1.0 where a token is not 0: none is below."""
    if other != 0:
        raise Unknown(f"a comparison with another token than 0{r.place()}")
    token(r, out, input, 0)


@handles("float", "to", "type")
def cast(r: Recorder, out: Tensor, input: Tensor, *_: Any, **more: Any) -> None:
    """Yes and no as 1 and 0, which they are already."""
    view = r.leading(input, True)
    if view.slot.tokens or not out.is_floating_point() or input.dtype.is_floating_point:
        raise Unknown(f"a cast{r.place()}")
    r.record(out, move(view, natural(view.shape)))


@handles("embedding")
def embedding(
    r: Recorder, out: Tensor, input: Tensor, weight: Tensor, *, padding_idx: Any, max_norm: Any, **more: Any
) -> None:
    view = r.leading(input, True)
    if max_norm is not None or more["scale_grad_by_freq"] or not view.slot.tokens:
        raise Unknown(f"an embedding of numbers, with max_norm or scale_grad_by_freq{r.place()}")
    lines, (rows, width) = math.prod(view.shape), weight.shape
    # none of the sample itself: `Plan.vocabulary`
    below = [op.facts.get("below", rows + 1) for op in r.ops if op.out is view.slot]
    if not view.whole or any(n > rows for n in below):
        raise Unknown(f"an embedding of {rows} rows, which tokens may exceed{r.place()}")
    size = [rows, -1 if padding_idx is None else padding_idx % rows]
    r.layer(out, "embed", [Use(view, (1, 1, lines))], (1, lines, width), weight, size=size, keeps=False)


@handles("dropout")
def dropout(r: Recorder, out: Tensor, input: Tensor, *_: Any, **more: Any) -> None:
    """A keyed layer: nn.Dropout and the like, while they train."""
    layer, view = r.dropping, r.leading(input)
    if layer is None:
        raise Unknown(f"dropout that is no layer{r.place()}")
    shape, r.dropping = view.shape, None
    share = math.prod(shape[len(shape) - layer.shared_axes(input) :])
    r.drops += 1
    how: dict[str, Any] = {
        "size": [r.drops, share, math.ceil(layer.p * 2**BITS)],
        "numbers": (1 / (1 - layer.p) if layer.p < 1 else 0.0,),
        "space": math.prod(shape) // share,
    }
    made = flat(shape)
    r.layer(out, "drop", [Use(view, made)], made, **how, in_place=True, overwrites=True, keeps=False)


KNOWN = HANDLERS  # the functions of both files
