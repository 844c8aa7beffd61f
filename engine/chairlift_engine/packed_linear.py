"""Linear layers whose fp32 weights are laid out once for the kernel in `linear.cpp`.

A step of few rows is bound by reading weights. Where every weight of a layer is exactly a bf16
number, as in models published in bf16, the layer is stored in bf16 and widened in registers: half
the memory traffic, the same products. A row's result is the same bits whatever rows run beside it.
Without the kernel, and with it for anything but plain fp32 linear layers, torch's GEMMs stay; their
bits are the same for row counts that are multiples of ROW_MULTIPLE only. Called by `models` once,
at load.
"""

from __future__ import annotations

import platform

import torch
from torch import Tensor, nn

from chairlift_engine.cpu_kernels import cpu_ops

# GEMM libraries pick a kernel by the number of rows: in fp32, results are the same bits for every
# multiple of 4.
ROW_MULTIPLE = 8
# oneDNN's layout is chosen for this many rows; it was the same for every number tried.
TYPICAL_ROWS = 64


def pack_linears(model: nn.Module) -> int:
    """Replace every plain fp32 linear layer, where the machine has kernels for it.

    Returns the multiple to fill row counts up to, for results that do not depend on them.
    """
    layer = _layer_class()
    if layer is None:
        return ROW_MULTIPLE
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.dtype == torch.float32:
                setattr(parent, name, layer(child))
    return 1 if layer is _PackedLinear and not _has_other_weights(model) else ROW_MULTIPLE


def _layer_class() -> type[_PackedLinear | _OneDnnLinear] | None:
    if cpu_ops() is not None:
        return _PackedLinear
    if platform.machine() in ("x86_64", "AMD64") and torch._C._has_mkldnn:
        return _OneDnnLinear
    return None


def _has_other_weights(model: nn.Module) -> bool:
    """Packed layers have no parameters left; an embedding is looked up, not multiplied."""
    return any(
        parameter.dim() > 1
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    )


class _PackedLinear(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        ops = cpu_ops()
        assert ops is not None, "pack_linears asks first"
        weight = linear.weight.detach()
        as_bf16 = torch.equal(weight.bfloat16().float(), weight)
        self._packed, self._bias = ops.pack_linear(weight, linear.bias, as_bf16)
        self._multiply = ops.linear
        self._num_outputs = linear.out_features

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self._multiply(rows, self._packed, self._bias, self._num_outputs)
        return out


class _OneDnnLinear(nn.Module):
    """For want of a compiler: 1.1 to 2 times faster than MKL, which repacks in every call."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_ROWS)
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._packed, self._bias, "none", [], ""
        )
        return out
