"""The network in a placement's precision: the types of its weights and of its arithmetic."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import nn

from paceline.device import float_dtype
from paceline.model.build import build_network
from paceline.model.network import Network
from paceline.planning import Plan


def network_on_device(plan: Plan, device: torch.device) -> Network:
    """The network of a plan, weights not yet set, where and as the placement holds it; frozen blocks are frozen."""
    return on_device(build_network(plan.recipe, plan.facts), plan, device)


def on_device(network: Network, plan: Plan, device: torch.device) -> Network:
    """A network, or a slice of one, where and as the placement holds it; frozen blocks are frozen."""
    module = network.to(device, float_dtype(plan))
    network = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if plan.placement.weights in ("bf16", "fp16"):
        _halve_weights(network, plan)
    network.freeze([name for name in plan.frozen if name in network._modules])
    return network


def autocast(plan: Plan, device: torch.device) -> AbstractContextManager[object]:
    """Forward passes compute in 16 bits in this context, if the placement says so."""
    return torch.autocast(device.type, _half_dtype(plan), enabled=plan.placement.precision in ("bf16", "fp16"))


def compute_dtype(plan: Plan) -> torch.dtype:
    """The type in which convolutions and dense layers compute."""
    return _half_dtype(plan) if plan.placement.precision in ("bf16", "fp16") else float_dtype(plan)


def _halve_weights(network: Network, plan: Plan) -> None:
    """Hold the weights of convolutions and dense layers in 16 bits; their gradients still add up in 32."""
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.to(_half_dtype(plan))
            for parameter in layer.parameters():
                parameter.grad_dtype = float_dtype(plan)


def _half_dtype(plan: Plan) -> torch.dtype:
    return torch.float16 if plan.placement.precision == "fp16" else torch.bfloat16
