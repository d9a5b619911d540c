"""The CPU kernels: gradients, SGD and scores of this package's networks in C, with the mini-batch as the vector (`lanes.c`).

`Native` describes one architecture to the library and calls it on rows of torch tensors, whose memory it reads and writes in place. Where
the library was not built, or the model is not one of ours, `native` returns None and the same numbers come from PyTorch.

Axes: W row width, D parameters, M images, C classes, F what the head reads.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import POINTER, c_double, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

FORMS = {"avx512": 512, "avx2": 256, "portable": 128}  # by the bits of a vector
MOST = 4  # stages, and dense layers, that the library knows


class _Net(ctypes.Structure):
    _fields_ = [
        *((name, c_int32) for name in ("height", "width", "channels", "stages")),
        ("filters", c_int32 * MOST),
        ("layers", c_int32),
        ("units", c_int32 * MOST),
        ("scale", c_void_p),
        ("shift", c_void_p),
    ]


class _Images(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("pixels", "labels", "order", "crop")),
        ("total", c_int64),
        *((name, c_int32) for name in ("rows", "columns", "corner")),
    ]


class _Sgd(ctypes.Structure):
    _fields_ = [
        *((name, c_float) for name in ("lr", "momentum", "decay", "clip", "mu")),
        ("towards", c_void_p),
        ("trained", c_void_p),
    ]


SIGNATURES = {
    "space": (c_int64, [POINTER(_Net)]),
    "gradient": (c_double, [POINTER(_Net), c_void_p, c_void_p, POINTER(_Images), c_int64, c_int32, c_void_p]),
    "step": (None, [c_void_p, c_void_p, c_void_p, c_int64, POINTER(_Sgd)]),
    "train": (
        c_double,
        [
            *[POINTER(_Net), c_void_p, c_void_p, POINTER(_Images)],
            *[c_int64, c_int32, c_int32, POINTER(_Sgd), c_void_p],
        ],
    ),
    "score": (None, [POINTER(_Net), c_void_p, c_int64, c_int32, POINTER(_Images), c_int64, *[c_void_p] * 5]),
}


def library() -> Any:
    return ctypes.CDLL("/tmp/kern/lanes.so")


def data(x):
    if x is None:
        return None
    return x.data_ptr() if isinstance(x, Tensor) else x.ctypes.data


class Native:
    def __init__(self, module: nn.Module, shape, scale, shift, form):
        h, w, c = shape
        parts = list(module.children())
        convs = [p for p in parts if isinstance(p, nn.Conv2d)]
        dense = [p for p in parts if isinstance(p, nn.Linear)]
        self.scale, self.shift = scale, shift
        self.net = _Net(
            h, w, c, len(convs), (c_int32 * MOST)(*[p.out_channels for p in convs]),
            len(dense), (c_int32 * MOST)(*[p.out_features for p in dense]), data(scale), data(shift),
        )
        lib = library()
        for name, (result, arguments) in SIGNATURES.items():
            f = getattr(lib, f"{name}_{FORMS[form]}")
            f.restype, f.argtypes = result, arguments
            setattr(self, "_" + name, f)
        self.memory = np.zeros(self._space(self.net) + 64, np.uint8)
        self.work = -(-self.memory.ctypes.data // 64) * 64

    def images(self, pixels, labels, order=None, crop=None, corner=0):
        return _Images(data(pixels), data(labels), data(order), data(crop), 0 if crop is None else crop.shape[1], pixels.shape[1], pixels.shape[2], corner)

    def gradient(self, w, g, images, first, count):
        return self._gradient(self.net, data(w), data(g), images, first, count, self.work)

    def train(self, w, m, images, n, epochs, batch, sgd):
        return self._train(self.net, data(w), data(m), images, n, epochs, batch, sgd, self.work)
