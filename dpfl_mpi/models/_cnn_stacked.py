"""Forward and backward of the paper's CNN for many clients at once, as batched matrix products.

A 5x5 convolution and a 2x2 max-pool read one 6x6 window, with stride 2, for each pooled pixel. The
four outputs ("phases") that the pool compares are four shifts of the filter inside that window. So
both are one matrix product with 4*O rows (each filter four times, shifted and zero-padded), and a
maximum over the phases. That is 44 % more arithmetic than unfolding at stride 1, in products four
times as wide: with 6 and 16 channels their narrowness is what costs. ReLU comes after the pool.

Axes: k rows (models), S mini-batch, H W image, C channels in, O channels out,
P = S * pooled height * pooled width, F = 36 * C.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def where_positive(d: Tensor, condition: Tensor) -> Tensor:
    """Return `d` where `condition > 0`, elsewhere 0; five times as fast as by a mask."""
    return torch.ops.aten.threshold_backward(d, condition, 0)


def windows(x_kSHWC: Tensor) -> Tensor:
    """Return `[k, P, F]`: the 6x6 window (order y, x, channel) under each pooled pixel, copied."""
    k, s, h, w, c = x_kSHWC.shape
    x = x_kSHWC.contiguous()
    shape = (k, s, (h - 4) // 2, (w - 4) // 2, 6, 6 * c)
    strides = (s * h * w * c, h * w * c, 2 * w * c, 2 * c, w * c, 1)
    return x.as_strided(shape, strides).reshape(k, -1, 36 * c)


def fold(d_kPF: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the transpose of `windows`: `[k, S, H, W, C]` where overlapping windows add up."""
    k, s, h, w, c = shape
    p, q = (h - 4) // 2, (w - 4) // 2
    d = d_kPF.view(k * s, p, q, 3, 2, 6 * c)
    lines = d.new_zeros(
        k * s, p + 2, 2, q, 6 * c
    )  # first along y: three overlapping pairs of lines
    for a in range(3):
        lines[:, a : a + p].add_(d[:, :, :, a].transpose(2, 3))
    lines = lines.view(-1, q, 3, 2 * c)
    x = d.new_zeros(
        lines.shape[0], q + 2, 2 * c
    )  # then along x: three overlapping pairs of columns
    for b in range(3):
        x[:, b : b + q].add_(lines[:, :, b])
    x = x.view(k, s, 2 * (p + 2), 2 * (q + 2), c)
    return F.pad(x, (0, 0, 0, w - x.shape[3], 0, h - x.shape[2])) if x.shape[2:4] != (h, w) else x


def phases(w_kOCyx: Tensor) -> Tensor:
    """Return `[k, 4*O, F]`: each filter at its four places, order (phase, O) by (y, x, channel)."""
    k, o, c, _, _ = w_kOCyx.shape
    filters = w_kOCyx.permute(0, 1, 3, 4, 2)
    places = [F.pad(filters, (0, 0, x, 1 - x, y, 1 - y)) for y in (0, 1) for x in (0, 1)]
    return torch.stack(places, 1).view(k, 4 * o, 36 * c)


def unphase(g_kRF: Tensor, channels: int) -> Tensor:
    """Return the transpose of `phases`, `[k, O, C, 5, 5]`: sums over the four places."""
    k, r, _ = g_kRF.shape
    g = g_kRF.view(k, 4, r // 4, 6, 6, channels)
    total = g[:, 0, :, 0:5, 0:5] + g[:, 1, :, 0:5, 1:6]
    total += g[:, 2, :, 1:6, 0:5]
    total += g[:, 3, :, 1:6, 1:6]
    return total.permute(0, 1, 4, 2, 3)


def pool(z_k4OP: Tensor) -> Tensor:
    """Return the maximum over the four phases, `[k, O, P]`."""
    z0, z1, z2, z3 = z_k4OP.unbind(1)
    return torch.maximum(torch.maximum(z0, z1), torch.maximum(z2, z3))


def pool_backward(z_k4OP: Tensor, d_kOP: Tensor) -> Tensor:
    """Return `[k, 4, O, P]`: the gradient at the first largest phase, as `max_pool2d` at ties."""
    z0, z1, z2, z3 = z_k4OP.unbind(1)
    lower = where_positive(d_kOP, torch.maximum(z2, z3) - torch.maximum(z0, z1))
    upper = d_kOP - lower
    d1, d3 = where_positive(upper, z1 - z0), where_positive(lower, z3 - z2)
    return torch.stack((upper - d1, d1, lower - d3, d3), 1)


class StackedCNN:
    """Logits and gradients of rows of `models.cnn.CNN`.

    With `bfloat16_products` the factors of matrix products are rounded to bfloat16, on a CPU also
    the results.
    """

    def __init__(self, bfloat16_products: bool = False):
        self.bfloat16_products = bfloat16_products

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the matrix products `[k, ...]` of a and b."""
        if not self.bfloat16_products:
            return torch.bmm(a, b)
        if a.is_cuda:  # with a result of bfloat16 cuBLAS may add up parts of a sum in it
            return torch.bmm(a.bfloat16(), b.bfloat16(), out_dtype=torch.float32)
        return torch.bmm(a.bfloat16(), b.bfloat16()).float()

    def dense(self, x_kSI: Tensor, layers: dict[str, Tensor], name: str) -> Tensor:
        """Return a fully connected layer's outputs `[k, S, O]`."""
        w_kIO, b_k1O = layers[f"{name}.weight"].transpose(1, 2), layers[f"{name}.bias"][:, None]
        if self.bfloat16_products:
            return self.product(x_kSI, w_kIO).add_(b_k1O)
        return torch.baddbmm(b_k1O, x_kSI, w_kIO)

    def prepare_images(self, x_kSHWC: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
        """Return the windows of the images, and `(S, pooled height, pooled width)`."""
        _, s, h, w, _ = x_kSHWC.shape
        return windows(x_kSHWC), (s, (h - 4) // 2, (w - 4) // 2)

    def prepare_rows(self, layers: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Return the layers and the filters of both convolutions at their four places."""
        return layers, phases(layers["conv1.weight"]), phases(layers["conv2.weight"])

    def logits(self, rows, images) -> Tensor:
        """Return `[rows, S, classes]`; consecutive rows may share one client's images."""
        return self._forward(rows, images)[0]

    def gradient(
        self, layers: dict[str, Tensor], x_kSHWC: Tensor, y_kS: Tensor, weight_kS: Tensor
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return the gradient of each row's weighted sum of losses, by layer, and the sums."""
        images = self.prepare_images(x_kSHWC)
        _, _, w2 = rows = self.prepare_rows(layers)
        logits, (z1, a1, cols2, z2, flat, h1, h2) = self._forward(rows, images)
        cols1, (s, _, _) = images
        k = logits.shape[0]
        log_p = logits.log_softmax(2)
        loss = -(log_p.gather(2, y_kS[:, :, None])[:, :, 0] * weight_kS).sum(1)
        classes = torch.arange(logits.shape[2], device=y_kS.device)
        chosen = y_kS[:, :, None] == classes  # no scatter: deterministic
        d = log_p.exp_().sub_(chosen.float()).mul_(weight_kS[:, :, None])
        grads = {}
        for name, inputs, masked in (("head", h2, True), ("fc2", h1, True), ("fc1", flat, False)):
            grads[f"{name}.weight"] = self.product(d.transpose(1, 2), inputs)
            grads[f"{name}.bias"] = d.sum(1)
            d = self.product(d, layers[f"{name}.weight"])
            if masked:
                d = where_positive(d, inputs)
        d = where_positive(d, flat)
        o = w2.shape[1] // 4
        d = d.view(k, s, o, -1).transpose(1, 2).reshape(k, o, -1)  # [k, O, P]
        grads["conv2.bias"] = d.sum(2)
        d = pool_backward(z2, d).view(k, 4 * o, -1)
        c = a1.shape[-1]
        grads["conv2.weight"] = unphase(self.product(d, cols2), c)
        d = fold(self.product(d.transpose(1, 2), w2), a1.shape)
        d = where_positive(d, a1)
        d = d.permute(0, 4, 1, 2, 3).reshape(k, c, -1)
        grads["conv1.bias"] = d.sum(2)
        d = pool_backward(z1, d).view(k, 4 * c, -1)
        grads["conv1.weight"] = unphase(self.product(d, cols1), x_kSHWC.shape[-1])
        return grads, loss

    def _forward(self, rows, images):
        layers, w1, w2 = rows
        cols1, (s, h, w) = images
        k, r, f = w1.shape
        clients = len(cols1)  # whose rows share its windows in one product, 4*O*rows wide
        w1 = w1.view(clients, k // clients * r, f)
        z1 = self.product(w1, cols1.transpose(1, 2)).view(k, 4, r // 4, -1)
        a1 = (pool(z1) + layers["conv1.bias"][:, :, None]).relu_()
        a1 = a1.view(k, r // 4, s, h, w).permute(0, 2, 3, 4, 1).contiguous()
        cols2 = windows(a1)
        o = w2.shape[1] // 4
        z2 = self.product(w2, cols2.transpose(1, 2)).view(k, 4, o, -1)
        a2 = (pool(z2) + layers["conv2.bias"][:, :, None]).relu_()
        # channel, y, x: torch's flatten order
        flat = a2.view(k, o, s, -1).transpose(1, 2).reshape(k, s, -1)
        h1 = self.dense(flat, layers, "fc1").relu_()
        h2 = self.dense(h1, layers, "fc2").relu_()
        return self.dense(h2, layers, "head"), (z1, a1, cols2, z2, flat, h1, h2)
