"""What a call of PyTorch becomes: one function for each, by the call's name.

`r` records, `out` is the call's result on the samples of the trial. Then come the call's own
arguments, by PyTorch's names.

Axes: O outputs, I inputs, C channels, H W image, P Q height and width of outputs, F vector,
L lines.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from dpfl_mpi.numerics.lanes.trace import Fill, Geometry, Unknown, Use, image

HANDLERS: dict[str, Callable[..., Any]] = {}
FIRST_CACHE = 96  # positions of four channels and as many gradients: 48 KiB with 16 lanes


def handles(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function for the calls of these names."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        HANDLERS.update(dict.fromkeys(names, function))
        return function

    return enter


def pair(value: Any, axes: int, first: int) -> tuple[int, int]:
    """Return a setting of two axes; a setting of one axis has `first` for the other."""
    numbers = value if isinstance(value, list | tuple) else (value,)
    return (int(numbers[0]) if axes == 2 else first), int(numbers[-1])


# dense layers and convolutions ---------------------------------------------------------------
@handles("linear")
def linear(r, out, input, weight, bias=None):
    """Record a dense layer of vectors.

    Of lines it is a convolution of one tap, whose channels are the units of a line.
    """
    if any(t is not None and r.is_shared(t) for t in (weight, bias)):
        with r:
            made = input @ weight.t()
            return made if bias is None else made + bias
    view, (outputs, inputs) = r.leading(input), weight.shape
    lines = math.prod(view.shape[:-1])
    what = [Use(view, (1, lines, inputs))], (1, lines, outputs), weight, bias

    def fill(x: Any, y: Any) -> tuple[list[int], list[int]]:
        forward = [1, lines, 0, 0, y.line, 0, x.line, 1, 0, 0]
        back = [1, lines, 0, 0, x.line, 0, y.line, 1, 0, 0]
        return [1, 1, outputs, inputs, 1, 1, 1], forward + back

    if lines == 1:
        r.layer(out, "dense", *what, scratch=inputs + 1, keeps=False)
    else:
        r.layer(out, "conv", *what, fill=fill, **work_space(weight, 1), keeps=False)
    return None


@handles("conv1d", "conv2d")
def conv(r, out, input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    """Record a convolution; one of one axis is of images of one line."""
    view, axes = r.leading(input), weight.dim() - 2
    shape = image(view.shape)
    kernel, stride, dilation = (pair(v, axes, 1) for v in (weight.shape[2:], stride, dilation))
    if isinstance(padding, str):
        total = [0, 0]
        if padding == "same":
            total = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        if any(n % 2 for n in total):
            raise Unknown("padding='same' of an even kernel")
        padding = [n // 2 for n in total]
    padding = pair(padding, axes, 0)
    made = image(out.shape[1:])
    sizes = [*zip(made[1:], shape[1:], kernel, stride, padding, dilation, strict=True)]
    plain = stride == dilation == (1, 1) and padding == (0, 0) and groups == 1
    r.layer(
        out, "conv", [Use(view, shape, padding)], made, weight, bias,
        fill=correlations(sizes, weight.shape[0], shape[0], groups),
        margin=(back_margin(*sizes[0]), back_margin(*sizes[1])),
        **work_space(weight, groups),
        in_stage=kernel == (5, 5) and plain and bias is not None,
        keeps=False,
    )  # fmt: skip


def work_space(weight: Any, groups: int) -> dict[str, int]:
    """Return the vectors that a convolution works in; the shortest vector has four floats."""
    return {
        "scratch": weight.numel() + len(weight),
        "own": -(-weight.numel() // groups // 4),
    }


def back_margin(
    outputs: int, inputs: int, kernel: int, stride: int, padding: int, dilation: int
) -> int:
    """Return how far the way back reads beyond the outputs of an axis."""
    numerators = [i + padding - k * dilation for i in range(inputs) for k in range(kernel)]
    places = [n // stride for n in numerators if n % stride == 0]
    return max([0, -min(places, default=0), max(places, default=0) - outputs + 1])


def correlations(sizes: list[tuple[int, ...]], outputs: int, inputs: int, groups: int) -> Fill:
    """Return what gives the size and table of a convolution.

    The table has the correlation forward, and back one for each remainder of a place by the stride.
    """

    def fill(x: Any, y: Any) -> tuple[list[int], list[int]]:
        (p, h, kh, sy, py, dy), (q, w, kw, sx, px, dx) = sizes
        taps = [(i, j) for i in range(kh) for j in range(kw)]
        table = [p, q, 0, y.line, 1, sy * x.line, sx, len(taps)]
        table += [(i * dy - py) * x.line + j * dx - px for i, j in taps] + list(range(len(taps)))
        starts = [(top, left) for top in range(min(sy, h)) for left in range(min(sx, w))]
        for top, left in starts:
            rows = [(i, *divmod(top + py - i * dy, sy)) for i in range(kh)]
            columns = [(j, *divmod(left + px - j * dx, sx)) for j in range(kw)]
            used = [(row, column) for row in rows for column in columns if row[2] == column[2] == 0]
            table += [-(-(h - top) // sy), -(-(w - left) // sx), top * x.line + left, sy * x.line]
            table += [sx, y.line, 1, len(used)]
            table += [row[1] * y.line + column[1] for row, column in used]
            table += [row[0] * kw + column[0] for row, column in used]
        size = [groups, len(starts), outputs, inputs, y.plane, x.plane, max(1, FIRST_CACHE // q)]
        return size, table

    return fill


# functions of each number --------------------------------------------------------------------
def each(r, out, kind, input, *numbers, overwrites=False):
    """Record a function of each number by itself, in whatever shape the numbers lie."""
    view = r.leading(input)
    shape = view.slot.geometry if view.whole else flat(view.shape)
    fields = {"numbers": numbers, "in_place": True, "overwrites": overwrites}
    r.layer(out, kind, [Use(view, shape)], shape, **fields)


def flat(shape: tuple[int, ...]) -> Geometry:
    """Return the geometry of numbers that lie one after the other."""
    return 1, 1, math.prod(shape)


def plain(kind: str, *numbers: float, overwrites: bool = False) -> Callable[..., None]:
    """Return what handles a function without settings."""
    return lambda r, out, input, inplace=False, **settings: each(
        r, out, kind, input, *numbers, overwrites=overwrites
    )


HANDLERS |= {"tanh": plain("squash"), "sigmoid": plain("sigmoid"), "silu": plain("silu")}
HANDLERS |= {"relu": plain("relu", overwrites=True), "relu6": plain("hardtanh", 0.0, 6.0)}
HANDLERS |= {"neg": plain("line", -1.0, 0.0), "logical_not": plain("line", -1.0, 1.0)}
HANDLERS |= {"zeros_like": plain("line", 0.0, 0.0), "ones_like": plain("line", 0.0, 1.0)}
HANDLERS |= {"sqrt": plain("root"), "reciprocal": plain("inverse")}
HANDLERS["invert"] = HANDLERS["bitwise_not"] = HANDLERS["logical_not"]


@handles("leaky_relu")
def leaky_relu(r, out, input, negative_slope=0.01, inplace=False):
    each(r, out, "leaky_relu", input, negative_slope)


@handles("elu")
def elu(r, out, input, alpha=1.0, inplace=False):
    each(r, out, "elu", input, alpha)


@handles("gelu")
def gelu(r, out, input, approximate="none"):
    each(r, out, "gelu" if approximate == "none" else "gelu_tanh", input)


@handles("clamp", "clip")
def clamp(r, out, input, min=None, max=None):
    limits = -math.inf if min is None else min, math.inf if max is None else max
    if not all(isinstance(limit, int | float) for limit in limits):
        raise Unknown("a clamp to tensors")
    each(r, out, "clamp", input, *map(float, limits))


@handles("hardtanh")
def hardtanh(r, out, input, min_val=-1.0, max_val=1.0, inplace=False):
    each(r, out, "hardtanh", input, min_val, max_val)


# pools ---------------------------------------------------------------------------------------
def pool(r, out, kind, input, table, in_stage=False, made=None):
    """Record a pool; `table` has the windows of the rows of outputs, then of the columns."""
    view = r.leading(input)
    shape, made = image(view.shape), made or image(out.shape[1:])
    space = math.prod(made) if kind == "max_pool" else 0
    rows, columns = table[: 3 * made[1]], table[3 * made[1] :]
    table = [*table, *readers(rows, shape[1]), *readers(columns, shape[2])]
    fields = {"table": table, "space": space, "in_stage": in_stage, "keeps": False}
    r.layer(out, kind, [Use(view, shape)], made, **fields)


def readers(table: list[int], size: int) -> list[int]:
    """Return the first and the end of the windows that have a number, for each of an axis."""
    out = []
    for i in range(size):
        have = [k for k, start in enumerate(table[::3]) if start <= i < table[3 * k + 1]]
        out += [have[0], have[-1] + 1] if have else [0, 0]
    return out


@handles("max_pool1d", "max_pool2d")
def max_pool(
    r, out, input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False,
    return_indices=False,
):  # fmt: skip
    if set(pair(dilation, 2, 1)) != {1} or return_indices:
        raise Unknown("a max-pool with dilation or indices")
    table, halves = windows(out, input, kernel_size, stride, padding, False)
    pool(r, out, "max_pool", input, table, halves and not ceil_mode)


@handles("avg_pool1d", "avg_pool2d")
def avg_pool(
    r, out, input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True,
    divisor_override=None,
):  # fmt: skip
    if divisor_override is not None:
        raise Unknown("a pool with a divisor of its own")
    table, _ = windows(out, input, kernel_size, stride, padding, count_include_pad)
    pool(r, out, "mean_pool", input, table)


def windows(out, input, kernel, stride, padding, counts_padding):
    """Return the table of a pool, and whether its windows are 2x2 side by side.

    The table has of each window start, end, and for how many numbers it counts.
    """
    axes, table = input.dim() - 2, []
    stride = kernel if stride in (None, [], ()) else stride
    kernel, stride, padding = pair(kernel, axes, 1), pair(stride, axes, 1), pair(padding, axes, 0)
    sizes = image(input.shape[1:])[1:], image(out.shape[1:])[1:]
    for size, outputs, k, step, pad in zip(*sizes, kernel, stride, padding, strict=True):
        for start in range(-pad, outputs * step - pad, step):
            low, high = max(start, 0), min(start + k, size)
            padded = min(start + k, size + pad) - start
            table += [low, high, padded if counts_padding else high - low]
    return table, axes == 2 and kernel == stride == (2, 2) and padding == (0, 0)


@handles("adaptive_avg_pool1d", "adaptive_avg_pool2d")
def adaptive_pool(r, out, input, *_, kind="mean_pool", **settings):
    table = []
    for size, outputs in zip(image(input.shape[1:])[1:], image(out.shape[1:])[1:], strict=True):
        for i in range(outputs):
            start, end = i * size // outputs, -(-(i + 1) * size // outputs)
            table += [start, end, end - start]
    pool(r, out, kind, input, table)


handles("adaptive_max_pool1d", "adaptive_max_pool2d")(
    functools.partial(adaptive_pool, kind="max_pool")
)


# norms ---------------------------------------------------------------------------------------
def norm(r, out, view, shape, groups, each, weight=None, bias=None, eps=1e-5, leaves_mean=False):
    """Record a norm of groups of planes.

    With `each`, it has a scale and shift for each number of a group, else for each plane.
    """
    parameters = math.prod(shape) // groups if each else shape[0]
    r.layer(
        out, "norm", [Use(view, shape)], shape, weight, bias,
        size=[groups, int(each), int(leaves_mean)], numbers=(eps,), space=2 * groups,
        scratch=2 * (parameters + groups), in_place=True, keeps=False,
    )  # fmt: skip


@handles("group_norm")
def group_norm(r, out, input, num_groups, weight=None, bias=None, eps=1e-5, cudnn_enabled=True):
    view = r.leading(input)
    shape = image(view.shape) if len(view.shape) > 1 else (view.shape[0], 1, 1)
    norm(r, out, view, shape, num_groups, False, weight, bias, eps)


@handles("instance_norm")
def instance_norm(r, out, input, *, weight, bias, eps, **settings):
    view = r.leading(input)
    norm(r, out, view, image(view.shape), view.shape[0], False, weight, bias, eps)


@handles("layer_norm")
def layer_norm(
    r, out, input, normalized_shape, weight=None, bias=None, eps=1e-5, *, leaves_mean=False,
    **settings,
):  # fmt: skip
    view, units = r.leading(input), math.prod(normalized_shape)
    groups = math.prod(view.shape) // units
    shape = (groups, 1, units)
    if groups == 1 and len(view.shape) > 1:
        shape = image(view.shape)
    norm(r, out, view, shape, groups, True, weight, bias, eps, leaves_mean)


@handles("rms_norm")
def rms_norm(r, out, input, normalized_shape, weight=None, eps=None):
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    layer_norm(r, out, input, normalized_shape, weight, eps=eps, leaves_mean=True)
