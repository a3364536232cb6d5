"""Which blocks of a network are computed in a fused form."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from paceline.model.alexnet import Convolution
from paceline.model.kernels.bottleneck import can_fuse
from paceline.model.kernels.convolution import NarrowConv
from paceline.model.kernels.stem import can_fuse_stem
from paceline.model.layers import ConvNorm, MaxPool, MeanPool
from paceline.model.mobile import InvertedUnit
from paceline.model.network import Network
from paceline.model.norm import BatchNormAct, GroupNormAct
from paceline.model.precision import compute_dtype
from paceline.model.resnet import ResidualUnit, Stem
from paceline.planning import Plan

CAPABILITY = (8, 0)
"""Older devices have no tensor cores for bfloat16."""
BOTTLENECK, STEM, SQUEEZE = "fused bottleneck", "fused stem", "fused squeeze-and-excite"
EXPANSION, EXPANSION_AND_SQUEEZE = "fused expansion", "fused expansion and squeeze-and-excite"
CONVOLUTIONS, NORMS, RELU, PLAIN = "fused convolutions", "fused norms", "fused ReLU", "plain"
FUSED_NORMS = (BatchNormAct, GroupNormAct)
ONE_KERNEL = (*FUSED_NORMS, Convolution, MaxPool, MeanPool)
"""Layers with a fused form of their own, whatever block they stand in."""


def fuse(network: Network, plan: Plan) -> dict[str, str]:
    """Give each block the fused form that it can have, if the placement wants them; gives the form of each."""
    cuda = plan.placement.device == "cuda"
    if plan.placement.kernels == "plain" or (cuda and torch.cuda.get_device_capability() < CAPABILITY):
        return dict.fromkeys(network._modules, PLAIN)
    # The small matrices between the products of a bottleneck hold gradients over many rows, which are too small for
    # float16; the CPU takes any type.
    products = plan.placement.precision == "bf16" or not cuda
    kinds = (*ONE_KERNEL, NarrowConv) if cuda and plan.placement.precision == "fp32" else ONE_KERNEL
    forms = {}
    for name, block in network.named_children():
        fused = [module for module in block.modules() if isinstance(module, kinds)]
        for module in fused:
            module.fused = True
        forms[name] = _name(fused)
        expanding = [module for module in block.modules() if isinstance(module, ConvNorm) and module.can_expand()]
        if products and expanding:
            for layer in expanding:
                layer.expands = True
            forms[name] = EXPANSION
        if products and isinstance(block, ResidualUnit) and can_fuse(block):
            block.fused = True
            forms[name] = BOTTLENECK
        elif isinstance(block, InvertedUnit) and block.can_fuse_squeeze():
            block.fused = True
            forms[name] = EXPANSION_AND_SQUEEZE if forms[name] == EXPANSION else SQUEEZE
        elif products and isinstance(block, Stem) and can_fuse_stem(block):
            block.fused = compute_dtype(plan)
            forms[name] = STEM
    return forms


def _name(fused: Sequence[nn.Module]) -> str:
    """What a block is called after the layers in it that are one kernel."""
    if any(isinstance(module, NarrowConv) for module in fused):
        return CONVOLUTIONS
    if any(isinstance(module, FUSED_NORMS) for module in fused):
        return NORMS
    return RELU if fused else PLAIN


class StepWeights:
    """16-bit copies of the weights that fused blocks multiply by, made once in a step by one call.

    The small matrices of widening convolutions are computed in float32 from the same numbers, so those are copied back.
    """

    def __init__(self, network: Network, dtype: torch.dtype) -> None:
        units = [module for module in network.modules() if isinstance(module, ResidualUnit) and module.fused]
        layers = [layer for unit in units for layer in unit.modules() if isinstance(layer, nn.Conv2d)]
        expanding = [module.conv for module in network.modules() if isinstance(module, ConvNorm) and module.expands]
        layers += expanding
        self._layers = [layer for layer in layers if layer.weight.dtype != dtype]
        self._copies = [torch.empty_like(layer.weight, dtype=dtype, requires_grad=False) for layer in self._layers]
        for layer, copy in zip(self._layers, self._copies, strict=True):
            layer.step_weight = copy
        widening = [unit.conv3 for unit in units] + [unit.projection for unit in units if unit.projects] + expanding
        widening = [layer for layer in widening if layer in self._layers]
        copies = dict(zip(self._layers, self._copies, strict=True))
        self._short = [copies[layer] for layer in widening]
        self._wide = [torch.empty_like(copy, dtype=torch.float32) for copy in self._short]
        for layer, copy in zip(widening, self._wide, strict=True):
            layer.wide_step_weight = copy

    def refresh(self) -> None:
        """Copy the weights as they are now, wherever an optimizer has put them since."""
        if self._copies:
            torch._foreach_copy_(self._copies, [layer.weight.detach() for layer in self._layers])
        if self._wide:
            torch._foreach_copy_(self._wide, self._short)
