"""What a call of PyTorch becomes: one function for each, by the call's name. `r` records, `out` is the call's result on the samples of the trial.

Axes: O outputs, I inputs, C channels, H W image, P Q height and width of outputs, F vector, L lines.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from dpfl_mpi.numerics.lanes.trace import Fill, Geometry, Recorder, Unknown, Use, View, image

HANDLERS: dict[str, Callable[..., Any]] = {}
FIRST_CACHE = 96  # positions of four channels and as many gradients: 48 KiB with 16 lanes


def handles(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function for the calls of these names."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        HANDLERS.update(dict.fromkeys(names, function))
        return function

    return enter


def pair(value: Any, first: int | None = None) -> tuple[int, int]:
    """Return a setting of two axes; where the `first` is given, the value is of the second alone."""
    numbers = value if isinstance(value, list | tuple) else (value,)
    return int(numbers[0]) if first is None else first, int(numbers[-1])


# dense layers and convolutions ------------------------------------------------------------------------------------------------
@handles("linear")
def linear(r: Recorder, out: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """A dense layer of vectors, or of each line of a sample: that is a convolution of one tap, whose channels are a line's units."""
    view, (outputs, inputs) = r.leading(input), weight.shape
    lines = math.prod(view.shape[:-1])
    what = [Use(view, (1, lines, inputs))], (1, lines, outputs), weight, bias

    def rows(x: Any, y: Any) -> tuple[list[int], list[int]]:
        there = [1, lines, 0, 0, y.line, 0, x.line, 1, 0, 0]
        back = [1, lines, 0, 0, x.line, 0, y.line, 1, 0, 0]
        return [1, 1, outputs, inputs, 1, 1, 1], there + back

    if lines == 1:
        r.layer(out, "dense", *what, size=[0], scratch=inputs + 1, keeps=False)
    else:
        r.layer(out, "conv", *what, fill=rows, scratch=outputs * inputs + 1 + inputs, keeps=False)


@handles("conv1d", "conv2d")
def conv(
    r: Recorder,
    out: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> None:
    """A convolution; one of one axis is an image of one line."""
    view, flat = r.leading(input), weight.dim() == 3
    shape = image(view.shape)
    kernel, stride, dilation = (
        pair(value, 1 if flat else None) for value in (list(weight.shape[2:]), stride, dilation)
    )
    if isinstance(padding, str):
        whole = [d * (k - 1) if padding == "same" else 0 for k, d in zip(kernel, dilation, strict=True)]
        if any(n % 2 for n in whole):
            raise Unknown(f"padding='same' of an even kernel{r.place()}")
        padding = tuple(n // 2 for n in whole)
    padding = pair(padding, 0 if flat else None)
    made = _, p, q = image(out.shape[1:])
    axes = list(zip((p, q), shape[1:], kernel, stride, padding, dilation, strict=True))
    alone = stride == dilation == (1, 1) and padding == (0, 0) and groups == 1
    how: dict[str, Any] = {
        "fill": correlations(axes, weight.shape[0], shape[0], groups),
        "margin": (edge(*axes[0]), edge(*axes[1])),
        "scratch": weight.numel() // groups + 1 + math.prod(weight.shape[1:]),
        "facts": {"stage": kernel == (5, 5) and alone and bias is not None},
    }
    r.layer(out, "conv", [Use(view, shape, padding)], made, weight, bias, **how, keeps=False)


def edge(outputs: int, inputs: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """Return how far the way back reads beyond the outputs of an axis."""
    taps = [divmod(i + padding - k * dilation, stride) for i in range(inputs) for k in range(kernel)]
    places = [place for place, rest in taps if rest == 0]
    return max([0, -min(places, default=0), max(places, default=0) - outputs + 1])


def correlations(axes: list[tuple[int, ...]], outputs: int, inputs: int, groups: int) -> Fill:
    """Return the size and table of a convolution: forward, and the way back for each remainder of a place by the stride."""

    def fill(x: Any, y: Any) -> tuple[list[int], list[int]]:
        (p, h, kh, sy, py, dy), (q, w, kw, sx, px, dx) = axes
        taps = [(i, j) for i in range(kh) for j in range(kw)]
        table = [p, q, 0, y.line, 1, sy * x.line, sx, len(taps)]
        table += [(i * dy - py) * x.line + j * dx - px for i, j in taps] + list(range(len(taps)))
        backs = 0
        for top in range(min(sy, h)):
            for left in range(min(sx, w)):
                here = [(i, j) for i, j in taps if (top + py - i * dy) % sy == 0 and (left + px - j * dx) % sx == 0]
                table += [-(-(h - top) // sy), -(-(w - left) // sx), top * x.line + left, sy * x.line, sx]
                table += [y.line, 1, len(here)]
                table += [(top + py - i * dy) // sy * y.line + (left + px - j * dx) // sx for i, j in here]
                table += [i * kw + j for i, j in here]
                backs += 1
        return [groups, backs, outputs, inputs, y.plane, x.plane, max(1, FIRST_CACHE // q)], table

    return fill


# functions of each number ---------------------------------------------------------------------------------------------------------
def each(r: Recorder, out: Tensor, kind: str, input: Tensor, *numbers: float, overwrites: bool = False) -> None:
    """A function of each number by itself: of the numbers as they lie, in whatever shape."""
    view = r.leading(input)
    shape = view.slot.geometry if view.whole else flat(view.shape)
    r.layer(out, kind, [Use(view, shape)], shape, numbers=numbers, in_place=True, overwrites=overwrites)


def flat(shape: tuple[int, ...]) -> Geometry:
    """Return the geometry of numbers of any shape that lie one after the other."""
    return 1, 1, math.prod(shape)


def plain(kind: str, *numbers: float, overwrites: bool = False) -> Callable[..., None]:
    """Return what handles a function without settings."""
    return lambda r, out, input, inplace=False: each(r, out, kind, input, *numbers, overwrites=overwrites)


HANDLERS |= {"tanh": plain("squash"), "sigmoid": plain("sigmoid"), "silu": plain("silu")}
HANDLERS |= {
    "relu": plain("relu", overwrites=True),
    "relu6": plain("hardtanh", 0.0, 6.0),
    "neg": plain("line", -1.0, 0.0),
}


@handles("leaky_relu")
def leaky_relu(r: Recorder, out: Tensor, input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> None:
    each(r, out, "leaky_relu", input, negative_slope)


@handles("gelu")
def gelu(r: Recorder, out: Tensor, input: Tensor, approximate: str = "none") -> None:
    each(r, out, "gelu" if approximate == "none" else "gelu_tanh", input)


@handles("clamp", "clip")
def clamp(r: Recorder, out: Tensor, input: Tensor, min: Any = None, max: Any = None) -> None:
    if not all(limit is None or isinstance(limit, int | float) for limit in (min, max)):
        raise Unknown(f"a clamp to tensors{r.place()}")
    each(r, out, "clamp", input, -math.inf if min is None else float(min), math.inf if max is None else float(max))


@handles("hardtanh")
def hardtanh(r: Recorder, out: Tensor, input: Tensor, min_val: float = -1.0, max_val: float = 1.0, **more: Any) -> None:
    each(r, out, "hardtanh", input, min_val, max_val)


# pools ------------------------------------------------------------------------------------------------------------------------------
def pool(r: Recorder, out: Tensor, kind: str, input: Tensor, table: list[int], halves: bool = False) -> None:
    """A pool of windows, first those of the rows of outputs, then those of the columns; `halves`: they are 2x2 side by side."""
    view = r.leading(input)
    use, made = Use(view, image(view.shape)), image(tuple(out.shape[1:]))
    space = math.prod(made) if kind == "max_pool" else 0
    r.layer(out, kind, [use], made, table=table, space=space, facts={"halves": halves}, keeps=False)


@handles("max_pool1d", "max_pool2d")
def max_pool(
    r: Recorder,
    out: Tensor,
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> None:
    if set(pair(dilation)) != {1} or return_indices:
        raise Unknown(f"a max-pool with dilation or indices{r.place()}")
    table, halves = windows_of(out, input, kernel_size, stride, padding, False)
    pool(r, out, "max_pool", input, table, halves and not ceil_mode)


@handles("avg_pool1d", "avg_pool2d")
def avg_pool(
    r: Recorder,
    out: Tensor,
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> None:
    if divisor_override is not None:
        raise Unknown(f"a pool with a divisor of its own{r.place()}")
    pool(r, out, "mean_pool", input, windows_of(out, input, kernel_size, stride, padding, count_include_pad)[0])


def windows_of(
    out: Tensor, input: Tensor, kernel: Any, stride: Any, padding: Any, whole: bool
) -> tuple[list[int], bool]:
    """Return where the window of each output starts and ends, and for how many numbers it counts (`whole`: with the padding), and whether it is 2x2 side by side."""
    flat, table = input.dim() == 3, []
    stride = kernel if stride in (None, [], ()) else stride
    kernel, stride = (pair(value, 1 if flat else None) for value in (kernel, stride))
    padding = pair(padding, 0 if flat else None)
    sizes = image(tuple(input.shape[1:]))[1:], image(tuple(out.shape[1:]))[1:]
    for size, outputs, k, step, pad in zip(*sizes, kernel, stride, padding, strict=True):
        for start in range(-pad, outputs * step - pad, step):
            low, high = max(start, 0), min(start + k, size)
            table += [low, high, (min(start + k, size + pad) - start) if whole else high - low]
    return table, not flat and kernel == stride == (2, 2) and padding == (0, 0)


@handles("adaptive_avg_pool1d", "adaptive_avg_pool2d")
def adaptive_pool(r: Recorder, out: Tensor, input: Tensor, *_: Any, kind: str = "mean_pool", **more: Any) -> None:
    table = []
    for size, outputs in zip(image(tuple(input.shape[1:]))[1:], image(tuple(out.shape[1:]))[1:], strict=True):
        for i in range(outputs):
            start, end = i * size // outputs, -(-(i + 1) * size // outputs)
            table += [start, end, end - start]
    pool(r, out, kind, input, table)


handles("adaptive_max_pool1d", "adaptive_max_pool2d")(functools.partial(adaptive_pool, kind="max_pool"))


# norms ------------------------------------------------------------------------------------------------------------------------------
def norm(
    r: Recorder,
    out: Tensor,
    view: View,
    shape: Geometry,
    groups: int,
    each: bool,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> None:
    """Each group of planes by itself; with `each` it has a scale and shift for each of its numbers, else for each plane."""
    how: dict[str, Any] = {
        "size": [groups, int(each), 0],
        "numbers": (eps,),
        "space": 2 * groups,
        "scratch": 2 * (math.prod(shape) // groups if each else shape[0]),
    }
    r.layer(out, "norm", [Use(view, shape)], shape, weight, bias, **how, in_place=True, keeps=False)


@handles("group_norm")
def group_norm(r: Recorder, out: Tensor, input: Tensor, num_groups: int, *rest: Any, **more: Any) -> None:
    view = r.leading(input)
    shape = image(view.shape) if len(view.shape) > 1 else (view.shape[0], 1, 1)
    norm(r, out, view, shape, num_groups, False, *rest, **more)


@handles("instance_norm")
def instance_norm(r: Recorder, out: Tensor, input: Tensor, *, weight: Any, bias: Any, eps: float, **more: Any) -> None:
    view = r.leading(input)
    norm(r, out, view, image(view.shape), view.shape[0], False, weight, bias, eps)


@handles("layer_norm")
def layer_norm(r: Recorder, out: Tensor, input: Tensor, normalized_shape: Any, *rest: Any, **more: Any) -> None:
    view, units = r.leading(input), math.prod(normalized_shape)
    groups = math.prod(view.shape) // units
    shape = image(view.shape) if groups == 1 and len(view.shape) > 1 else (groups, 1, units)
    norm(r, out, view, shape, groups, True, *rest, **more)
