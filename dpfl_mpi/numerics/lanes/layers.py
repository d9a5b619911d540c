"""Handlers: each turns the calls of one PyTorch function into an op, a layer of the kernels.

Here are those of layers with one input; `joins.py` has the others. `Recorder.call` (trace.py) finds
a handler by the name in its `@handles`, and calls it with the recorder, the result `out` that
PyTorch computed on three samples of zeros, and the call's own arguments, by PyTorch's names. Inside
`with recorder:` a handler's own calls are recorded in place of this one; it returns their result.
A geometry is (planes, lines, units): channels, height and width of an image.
"""

import math
from typing import Any

import torch

from dpfl_mpi.numerics.lanes.trace import Fill, Geometry, Unsupported, Use, handles, image

# outputs of a channel in one piece of a weight's gradient: inputs of four channels and as many
# gradients then stay in the first cache (48 KiB with 16 lanes)
PIECE = 96


def pair(value: Any, axes: int, first: int) -> tuple[int, int]:
    """Return a setting, such as a stride, of both axes; `first` stands for an axis that is not."""
    numbers = value if isinstance(value, list | tuple) else (value,)
    return (int(numbers[0]) if axes == 2 else first), int(numbers[-1])


# dense layers and convolutions ---------------------------------------------------------------
@handles("linear")
def linear(recorder, out, input, weight, bias=None):
    """Record a dense layer of a vector, or of each line of a text.

    Of lines it is a convolution of one tap, whose channels are the units of a line.
    """
    if any(t is not None and recorder.is_shared(t) for t in (weight, bias)):
        with recorder:  # a weight that is used twice is an input of a matrix product
            product = input @ weight.t()
            return product if bias is None else product + bias
    view, (outputs, inputs) = recorder.sample_view(input), weight.shape
    lines = math.prod(view.shape[:-1])
    layer = [Use(view, (1, lines, inputs))], (1, lines, outputs), weight, bias

    def fill(x: Any, y: Any) -> tuple[list[int], list[int]]:  # two of `correlations`
        forward = [1, lines, 0, 0, y.line_step, 0, x.line_step, 1, 0, 0]
        back = [1, lines, 0, 0, x.line_step, 0, y.line_step, 1, 0, 0]
        return [1, 1, outputs, inputs, 1, 1, 1], forward + back

    if lines == 1:
        recorder.add_layer(out, "dense", *layer, scratch=inputs + 1, keeps=False)
    else:
        recorder.add_layer(out, "conv", *layer, fill=fill, **work_space(weight, 1), keeps=False)
    return None


@handles("conv1d", "conv2d")
def conv(recorder, out, input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    """Record a convolution; one of one axis is of images of one line."""
    view, axes = recorder.sample_view(input), weight.dim() - 2
    shape = image(view.shape)
    kernel, stride, dilation = (pair(v, axes, 1) for v in (weight.shape[2:], stride, dilation))
    if isinstance(padding, str):
        same = padding == "same"  # else "valid"
        total = [same * d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        if any(n % 2 for n in total):
            raise Unsupported("padding='same' of an even kernel")
        padding = [n // 2 for n in total]
    padding = pair(padding, axes, 0)
    out_shape = image(out.shape[1:])
    # (outputs, inputs, kernel, stride, padding, dilation) of the rows, and of the columns
    sizes = [*zip(out_shape[1:], shape[1:], kernel, stride, padding, dilation, strict=True)]
    dense = stride == dilation == (1, 1) and padding == (0, 0) and groups == 1
    recorder.add_layer(
        out, "conv", [Use(view, shape, padding)], out_shape, weight, bias,
        fill=correlations(sizes, weight.shape[0], shape[0], groups),
        margin=(back_margin(*sizes[0]), back_margin(*sizes[1])),
        in_stage=kernel == (5, 5) and dense and bias is not None,
        keeps=False, **work_space(weight, groups),
    )  # fmt: skip


def work_space(weight: Any, groups: int) -> dict[str, int]:
    """Return how many vectors a convolution works in, as fields of `Op`."""
    of_thread = -(-weight.numel() // groups // 4)  # a group's weights: a vector has four or more
    return {"scratch": weight.numel() + len(weight), "thread_scratch": of_thread}


def back_margin(
    outputs: int, inputs: int, kernel: int, stride: int, padding: int, dilation: int
) -> int:
    """Return how far the way back reads beyond the outputs of an axis: there must be zeros there.

    Input i meets tap k of the kernel in the output (i + padding - k * dilation) / stride.
    """
    numerators = [i + padding - k * dilation for i in range(inputs) for k in range(kernel)]
    outputs_read = [n // stride for n in numerators if n % stride == 0]
    before, after = -min(outputs_read, default=0), max(outputs_read, default=0) - outputs + 1
    return max(0, before, after)


def correlations(sizes: list[tuple[int, ...]], outputs: int, inputs: int, groups: int) -> Fill:
    """Return the `fill` of a convolution; `sizes` are the arguments of `back_margin`, by axis.

    Its table has correlations (`Correlation` in conv.h): how many rows and columns are written,
    where the first lies, the steps between those that are written and those that are read, the
    number of taps, and where each tap reads and has its weight. The first correlation goes forward.
    Back, with strides sy and sx, the inputs (top + n sy, left + m sx) of all n and m meet the same
    taps: each (top, left) has a correlation.
    """

    def fill(x: Any, y: Any) -> tuple[list[int], list[int]]:
        (rows, height, kernel_y, sy, pad_y, dilation_y), axis_x = sizes
        columns, width, kernel_x, sx, pad_x, dilation_x = axis_x
        taps = [(i, j) for i in range(kernel_y) for j in range(kernel_x)]
        table = [rows, columns, 0, y.line_step, 1, sy * x.line_step, sx, len(taps)]
        table += [(i * dilation_y - pad_y) * x.line_step + j * dilation_x - pad_x for i, j in taps]
        table += range(len(taps))
        starts = [(top, left) for top in range(min(sy, height)) for left in range(min(sx, width))]
        for top, left in starts:
            # (tap, output that it leads to) of the taps that meet these rows, and these columns
            by_row = [(i, divmod(top + pad_y - i * dilation_y, sy)) for i in range(kernel_y)]
            by_column = [(j, divmod(left + pad_x - j * dilation_x, sx)) for j in range(kernel_x)]
            met_rows = [(i, output) for i, (output, rest) in by_row if rest == 0]
            met_columns = [(j, output) for j, (output, rest) in by_column if rest == 0]
            table += [-(-(height - top) // sy), -(-(width - left) // sx)]
            table += [top * x.line_step + left, sy * x.line_step, sx, y.line_step, 1]
            table += [len(met_rows) * len(met_columns)]
            table += [line * y.line_step + unit for _, line in met_rows for _, unit in met_columns]
            table += [i * kernel_x + j for i, _ in met_rows for j, _ in met_columns]
        rows_of_piece = max(1, PIECE // columns)
        size = [groups, len(starts), outputs, inputs, y.plane_step, x.plane_step, rows_of_piece]
        return size, table

    return fill


# functions of each number --------------------------------------------------------------------
def add_each(recorder, out, kind, input, *numbers, overwrites=False):
    """Record a function of each number by itself; `numbers` are the function's constants."""
    view = recorder.sample_view(input)
    shape = view.slot.geometry if view.whole else flat(view.shape)
    fields = {"numbers": numbers, "in_place": True, "overwrites": overwrites}
    recorder.add_layer(out, kind, [Use(view, shape)], shape, **fields)


def flat(shape: tuple[int, ...]) -> Geometry:
    """Return the geometry of numbers that lie one after the other."""
    return 1, 1, math.prod(shape)


@handles("tanh", kind="squash")
@handles("sigmoid", kind="sigmoid")
@handles("silu", kind="silu")
@handles("relu", kind="relu", overwrites=True)
@handles("relu6", kind="hardtanh", numbers=(0.0, 6.0))
@handles("sqrt", kind="root")
@handles("reciprocal", kind="inverse")
@handles("neg", kind="line", numbers=(-1.0, 0.0))  # a x + b
@handles("logical_not", "invert", "bitwise_not", kind="line", numbers=(-1.0, 1.0))
@handles("zeros_like", kind="line", numbers=(0.0, 0.0))
@handles("ones_like", kind="line", numbers=(0.0, 1.0))
def plain(recorder, out, input, inplace=False, *, kind, numbers=(), overwrites=False, **settings):
    """Record a function whose settings, if any, change no number."""
    add_each(recorder, out, kind, input, *numbers, overwrites=overwrites)


@handles("leaky_relu")
def leaky_relu(recorder, out, input, negative_slope=0.01, inplace=False):
    add_each(recorder, out, "leaky_relu", input, negative_slope)


@handles("elu")
def elu(recorder, out, input, alpha=1.0, inplace=False):
    add_each(recorder, out, "elu", input, alpha)


@handles("gelu")
def gelu(recorder, out, input, approximate="none"):
    add_each(recorder, out, "gelu" if approximate == "none" else "gelu_tanh", input)


@handles("clamp", "clip")
def clamp(recorder, out, input, min=None, max=None):
    limits = -math.inf if min is None else min, math.inf if max is None else max
    if not all(isinstance(limit, int | float) for limit in limits):
        raise Unsupported("a clamp to tensors")
    add_each(recorder, out, "clamp", input, *map(float, limits))


@handles("hardtanh")
def hardtanh(recorder, out, input, min_val=-1.0, max_val=1.0, inplace=False):
    add_each(recorder, out, "hardtanh", input, min_val, max_val)


# pools ---------------------------------------------------------------------------------------
def add_pool(recorder, out, kind, input, table, in_stage=False, out_shape=None):
    """Record a pool; `table` has the window of each row of outputs, then of each column.

    A window is three numbers: its start, its end, and by how many numbers a mean divides.
    """
    view = recorder.sample_view(input)
    shape, out_shape = image(view.shape), out_shape or image(out.shape[1:])
    rows, columns = table[: 3 * out_shape[1]], table[3 * out_shape[1] :]
    table = [*table, *windows_with(rows, shape[1]), *windows_with(columns, shape[2])]
    # where in its window each maximum was
    space = math.prod(out_shape) if kind == "max_pool" else 0
    fields = {"table": table, "space": space, "in_stage": in_stage, "keeps": False}
    recorder.add_layer(out, kind, [Use(view, shape)], out_shape, **fields)


def windows_with(table: list[int], size: int) -> list[int]:
    """Return the first and the end of the windows with each input, for gradients of the inputs."""
    out = []
    for i in range(size):
        found = [k for k, start in enumerate(table[::3]) if start <= i < table[3 * k + 1]]
        out += [found[0], found[-1] + 1] if found else [0, 0]
    return out


@handles("max_pool1d", axes=1)
@handles("max_pool2d", axes=2)
def max_pool(
    recorder,
    out,
    input,
    kernel_size,
    stride=None,
    padding=0,
    dilation=1,
    ceil_mode=False,
    return_indices=False,
    *,
    axes,
):
    if set(pair(dilation, 2, 1)) != {1} or return_indices:
        raise Unsupported("a max-pool with dilation or indices")
    table, halves = windows(out, input, axes, kernel_size, stride, padding, False)
    in_stage = halves and not ceil_mode  # a stage halves both sides of an image
    add_pool(recorder, out, "max_pool", input, table, in_stage)


@handles("avg_pool1d", axes=1)
@handles("avg_pool2d", axes=2)
def avg_pool(
    recorder,
    out,
    input,
    kernel_size,
    stride=None,
    padding=0,
    ceil_mode=False,
    count_include_pad=True,
    divisor_override=None,
    *,
    axes,
):
    if divisor_override is not None:
        raise Unsupported("a pool with a divisor of its own")
    table, _ = windows(out, input, axes, kernel_size, stride, padding, count_include_pad)
    add_pool(recorder, out, "mean_pool", input, table)


def check_axes(input, axes):
    """Refuse a pool of images without channels: PyTorch would take samples for channels."""
    if input.dim() != axes + 2:
        raise Unsupported("a pool over samples")


def windows(out, input, axes, kernel, stride, padding, counts_padding):
    """Return the table of a pool as in `add_pool`, and whether its windows are 2x2 side by side."""
    check_axes(input, axes)
    table = []
    stride = kernel if stride in (None, [], ()) else stride
    kernel, stride, padding = pair(kernel, axes, 1), pair(stride, axes, 1), pair(padding, axes, 0)
    sizes = image(input.shape[1:])[1:], image(out.shape[1:])[1:]
    for size, outputs, k, step, pad in zip(*sizes, kernel, stride, padding, strict=True):
        for start in range(-pad, outputs * step - pad, step):
            low, high = max(start, 0), min(start + k, size)
            with_padding = min(start + k, size + pad) - start
            table += [low, high, with_padding if counts_padding else high - low]
    return table, axes == 2 and kernel == stride == (2, 2) and padding == (0, 0)


@handles("adaptive_avg_pool1d", axes=1)
@handles("adaptive_avg_pool2d", axes=2)
@handles("adaptive_max_pool1d", axes=1, kind="max_pool")
@handles("adaptive_max_pool2d", axes=2, kind="max_pool")
def adaptive_pool(recorder, out, input, *_, axes, kind="mean_pool", **settings):
    check_axes(input, axes)
    table = []
    for size, outputs in zip(image(input.shape[1:])[1:], image(out.shape[1:])[1:], strict=True):
        for i in range(outputs):
            start, end = i * size // outputs, -(-(i + 1) * size // outputs)
            table += [start, end, end - start]
    add_pool(recorder, out, kind, input, table)


# norms ---------------------------------------------------------------------------------------
def add_norm(
    recorder,
    out,
    view,
    shape,
    groups,
    weight=None,
    bias=None,
    eps=1e-5,
    of_units=False,
    leaves_mean=False,
):
    """Record a norm: each group of planes is brought to mean 0 (or not) and deviation 1.

    Scale and shift are for each plane, or with `of_units` for each number of a group.
    """
    parameters = math.prod(shape) // groups if of_units else shape[0]
    recorder.add_layer(
        out, "norm", [Use(view, shape)], shape, weight, bias,
        size=[groups, int(of_units), int(leaves_mean)], numbers=(eps,), space=2 * groups,
        scratch=2 * (parameters + groups), in_place=True, keeps=False,
    )  # fmt: skip


@handles("group_norm")
def group_norm(recorder, out, input, num_groups, weight=None, bias=None, eps=1e-5, *_, **settings):
    view = recorder.sample_view(input)
    shape = image(view.shape) if len(view.shape) > 1 else (view.shape[0], 1, 1)
    add_norm(recorder, out, view, shape, num_groups, weight, bias, eps)


@handles("instance_norm")
def instance_norm(recorder, out, input, *, weight, bias, eps, **settings):
    view = recorder.sample_view(input)
    add_norm(recorder, out, view, image(view.shape), view.shape[0], weight, bias, eps)


@handles("layer_norm")
def layer_norm(
    recorder,
    out,
    input,
    normalized_shape,
    weight=None,
    bias=None,
    eps=1e-5,
    *,
    leaves_mean=False,
    **settings,
):
    view, units = recorder.sample_view(input), math.prod(normalized_shape)
    groups = math.prod(view.shape) // units
    shape = (groups, 1, units)
    if groups == 1 and len(view.shape) > 1:
        shape = image(view.shape)
    add_norm(recorder, out, view, shape, groups, weight, bias, eps, True, leaves_mean)


@handles("rms_norm")
def rms_norm(recorder, out, input, normalized_shape, weight=None, eps=None):
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    layer_norm(recorder, out, input, normalized_shape, weight, eps=eps, leaves_mean=True)
