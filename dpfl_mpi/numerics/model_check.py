"""Check that a module can be a model here: it is tried on two samples before anything is trained.

What is refused would silently give wrong numbers: a forward that mixes the samples of a mini-batch
(scores come in parts), that draws random numbers of its own (they would depend on the number of
ranks), or that changes a buffer (a row holds parameters only). `models.make` calls `check_module`.
"""

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpfl_mpi.errors import LONGEST, UserError, own_line
from dpfl_mpi.numerics.dropout import Draws, keyed
from dpfl_mpi.numerics.ensemble import call, first_names, with_safe_norms

# layers that draw, some of them only for certain values of their input
DROPOUTS = (nn.AlphaDropout, nn.FeatureAlphaDropout)
RANDOM = (*DROPOUTS, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from the global generators as from `seed`, and leave them as they were."""
    # the legacy generator of NumPy, which a user's own build may draw from
    before, before_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(before)
            np.random.set_state(before_numpy)  # noqa: NPY002


def global_generators() -> tuple[Any, ...]:
    """Return the states of the random generators of `torch`, `numpy.random` and `random`."""
    _, keys, position, *rest = np.random.get_state()  # noqa: NPY002  # read, not drawn from
    of_torch = torch.get_rng_state().numpy().tobytes()
    return of_torch, np.asarray(keys).tobytes(), position, *rest, random.getstate()


def check_module(
    name: str,
    module: Any,
    shape: tuple[int, ...],
    dtype: str,
    classes: int,
    head: str,
    vocabulary: int = 2,
) -> None:
    """Raise `UserError` where a module on the CPU is no model for samples of shape and dtype."""
    model = f"--model {name}"
    if not isinstance(module, nn.Module):
        kind = type(module).__name__
        raise UserError(f"{model}: build returned a {kind}; it must return a torch.nn.Module")
    for layer, part in module.named_modules():
        batch_norm = isinstance(part, nn.modules.batchnorm._BatchNorm)
        if batch_norm or getattr(part, "track_running_stats", False):
            layer = f"layer {layer} ({type(part).__name__})"
            raise UserError(f"--model: {layer} keeps batch statistics; use GroupNorm or none")
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.inplace:
            raise UserError(f"--model: layer {layer} has inplace=True; allowed is False")
    for complaint in of_parameters(module):
        raise UserError(f"{model}{complaint}")
    if head and head not in dict(module.named_modules()):
        parts = dict(module.named_modules()).items()
        layers = [n for n, part in parts if n and list(part.parameters(recurse=False))]
        known = f"its layers are {', '.join(layers)}"
        raise UserError(f"{model}: HEAD is {head!r}, which is no layer; {known}")
    for complaint in of_forward(module, shape, dtype, classes, vocabulary):
        raise UserError(f"{model}: {complaint}")


def of_parameters(module: nn.Module) -> Iterator[str]:
    """Yield what is wrong with parameters: a float32 row cannot hold them, or not all train."""
    if not list(module.parameters()):
        yield " has no parameters; there is nothing to train"
    at: dict[int, str] = {}  # the first parameter at an address
    for name, p in module.named_parameters():
        if isinstance(p, nn.parameter.UninitializedParameter):
            yield f": {name} has no size yet (a Lazy layer); build must give every layer its size"
        if p._backward_hooks or p._post_accumulate_grad_hooks:
            yield f": {name} has a hook on its gradient, which would not be called"
        if p.numel() and (other := at.setdefault(p.data_ptr(), name)) != name:
            yield f": {name} lies in the memory of {other}; assign the Parameter, not its data"
        if p.dtype != torch.float32:
            kind = str(p.dtype).removeprefix("torch.")
            yield f": {name} is {kind}; parameters must be float32"
        if not p.requires_grad:
            yield f": {name} is frozen, but every parameter is trained; make it a buffer"
        if not bool(torch.isfinite(p).all()):
            yield f": {name} starts with a value that is not finite; initialise it in build"


def of_forward(
    module: nn.Module, shape: tuple[int, ...], dtype: str, classes: int, vocabulary: int
) -> Iterator[str]:
    """Yield what is wrong with forward, tried on two samples; the caller raises the first."""
    draws = Draws()
    try:
        learner = with_safe_norms(keyed(copy.deepcopy(module).train(), draws))
        scorer = copy.deepcopy(module).eval()
    except Exception as error:
        yield f"the module cannot be copied (copy.deepcopy): {in_one_line(error)}"
    two = samples(shape, dtype, vocabulary)
    buffers = {name: b.clone() for name, b in learner.named_buffers()}
    values = {name: p.detach().clone() for name, p in learner.named_parameters()}
    try:
        with torch.no_grad(), seeded(0):
            before = global_generators()
            draws.begin(torch.zeros((), dtype=torch.int64))
            logits, both, first = learner(two), scorer(two), scorer(two[:1])
            drew = before != global_generators()
    except Exception as error:
        size = "x".join(map(str, shape))
        yield f"forward failed on samples of {size}: {in_one_line(error)}"
    is_tensor = isinstance(logits, Tensor)
    if not (is_tensor and logits.is_floating_point() and logits.shape == (2, classes)):
        kind = f"tensor {list(logits.shape)}" if is_tensor else type(logits).__name__
        must = f"it must return logits, float [2, {classes}]"
        yield f"forward returned a {kind} for 2 samples of {classes} classes; {must}"
    if drew or any(isinstance(part, RANDOM) for part in learner.modules()):
        layers = "nn.Dropout, Dropout1d, Dropout2d, Dropout3d and MultiheadAttention (without"
        allowed = f"{layers} add_bias_kv, add_zero_attn), as layers that build makes"
        yield f"forward draws random numbers from a global generator; allowed are {allowed}"
    for name, p in learner.named_parameters():
        if not torch.equal(p, values[name]):
            yield f"forward changes the parameter {name} (as an Embedding's max_norm does)"
    for name, b in learner.named_buffers():
        if not torch.equal(b, buffers[name]):
            yield f"forward changes the buffer {name}; buffers must stay as build made them"
    alike = first.shape == (1, classes)
    if not alike or not torch.allclose(both[:1], first, rtol=1e-3, atol=1e-4, equal_nan=True):
        use = "use GroupNorm, not statistics of the mini-batch; batch_first=True in attention"
        yield f"forward gives a sample other logits when it is alone than beside another; {use}"
    if torch.equal(both[0], both[1]) and ignores_samples(scorer, two):
        use = "attention needs batch_first=True where the samples are the first axis"
        yield f"forward gives all samples the same logits, as it does not read them; {use}"
    try:
        names = untrained(module, learner, two, draws)
    except RuntimeError as error:
        yield f"the gradient of forward fails: {in_one_line(error)}"
    for name in names:
        use = "let forward use every layer, without detach or no_grad"
        yield f"the logits do not depend on {name}, so it cannot be trained; {use}"


def ignores_samples(scorer: nn.Module, two: Tensor) -> bool:
    """Return whether two samples have the same logits under other parameters, too.

    Under its own a model may give all samples the same: its last layer may start at 0.
    """
    with torch.no_grad(), seeded(0):
        changed = {name: p + 0.1 * torch.randn_like(p) for name, p in scorer.named_parameters()}
        a, b = call(scorer, first_names(scorer), changed, two)
    return torch.equal(a, b) and not torch.equal(two[0], two[1])


def untrained(module: nn.Module, learner: nn.Module, x: Tensor, draws: Draws) -> list[str]:
    """Return the names of the parameters that no gradient reaches from the logits.

    Raises:
        RuntimeError: rows cannot take the place of the parameters or of their gradients.
    """
    leaves = {name: p.detach().clone().requires_grad_() for name, p in learner.named_parameters()}
    hooks = "it hooks what is saved for the gradient (torch.utils.checkpoint)"
    no_hooks = torch.autograd.graph.disable_saved_tensors_hooks(hooks)
    with torch.enable_grad(), seeded(0), no_hooks:
        draws.begin(torch.zeros((), dtype=torch.int64))
        total = call(learner, first_names(learner), leaves, x).sum()
        if not total.requires_grad:
            return list(leaves)
        inputs = [*leaves.values(), *module.parameters(), *learner.parameters()]
        gradients = torch.autograd.grad(total, inputs, allow_unused=True)
    own, others = gradients[: len(leaves)], gradients[len(leaves) :]
    if any(g is not None for g in others):
        mend = "read it from its layer"
        raise RuntimeError(f"forward reads a parameter that it keeps beside its layers; {mend}")
    if any(g is not None and g.is_sparse for g in own):
        raise RuntimeError("it is sparse; use Embedding without sparse=True")
    return [name for name, gradient in zip(leaves, own, strict=True) if gradient is None]


def samples(shape: tuple[int, ...], dtype: str, vocabulary: int) -> Tensor:
    """Return two samples as forward takes them: normalised noise, or the tokens 0 and the last."""
    if dtype == "int32":
        return torch.tensor([[0], [vocabulary - 1]]).expand(2, *shape).contiguous()
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    return x.movedim(-1, 1) if len(shape) == 3 else x


def in_one_line(error: Exception) -> str:
    """Return an exception's type and text, and the last line of the model's own code, if any."""
    line = own_line(reversed([*walk_tb(error.__traceback__)]))
    return f"{type(error).__name__}: {' '.join(str(error).split())[:LONGEST]}{line}"
