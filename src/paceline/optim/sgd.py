"""SGD with or without momentum: torch's fused kernel, and a rule for clipped gradients and 16-bit weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.optim.flat import ParameterGroup
from paceline.optim.rule import StepView


class FusedSgd:
    """m = momentum * m + (g + decay * w); w -= lr * m, or with Nesterov w -= lr * (g + decay * w + momentum * m).

    Gradients are sums over images. The kernel divides by the number of images and skips bad steps, so the host never
    waits.
    """

    def __init__(self, groups: list[ParameterGroup], momentum: float, nesterov: bool) -> None:
        self._groups, self._momentum, self._nesterov = groups, momentum, nesterov
        named = {name: p for group in groups for name, p in group.parameters.items()}
        self._buffers = {name: torch.zeros_like(p) for name, p in named.items()} if momentum else {}

    @staticmethod
    def supports(parameter: Tensor) -> bool:
        """Whether the kernel can update a parameter; on CUDA it reads the learning rate in float32."""
        return parameter.dtype == torch.float32 or (parameter.dtype == torch.float64 and parameter.is_cpu)

    @torch.no_grad()
    def step(self, lr: Tensor, divisor: Tensor, bad: Tensor, _step: Tensor) -> None:
        """Move the weights by gradients / divisor unless the step is bad, and drop the gradients."""
        for group in self._groups:
            parameters: list[Tensor] = list(group.parameters.values())
            buffers = [self._buffers[name] for name in group.parameters] if self._momentum else []
            # A parameter without a gradient took no part; on other replicas it may have one, so it counts as 0.
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            group_lr = lr * group.lr_factor
            torch._fused_sgd_(
                parameters, gradients, buffers, weight_decay=group.decay, momentum=self._momentum,
                lr=group_lr if group_lr.is_cpu else group_lr.float(), dampening=0.0, nesterov=self._nesterov,
                maximize=False, is_first_step=False, grad_scale=divisor.float(), found_inf=bad,
            )  # fmt: skip
            for parameter in parameters:
                parameter.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """Everything that the optimizer carries from step to step, by name."""
        return {f"{name}.momentum": buffer for name, buffer in self._buffers.items()}


@dataclass(frozen=True)
class SgdRule:
    """The formula of `FusedSgd` on flat parameters."""

    momentum: float
    nesterov: bool
    needs_step_count = False

    @property
    def initial_state(self) -> dict[str, float]:
        return {"momentum": 0.0} if self.momentum else {}

    def update(self, view: StepView) -> tuple[Tensor, dict[str, Tensor]]:
        return sgd_update(view, view.decayed_gradient, self.momentum, self.nesterov)


@dataclass(frozen=True)
class FusedSgdRule(SgdRule):
    """The same by the kernel of `FusedSgd`, so that where the state is changes no bit: parameter by parameter, and with
    a gradient scale, because its rounding on CUDA depends on both."""

    def update(self, view: StepView) -> tuple[Tensor, dict[str, Tensor]]:
        weights, state = view.weights.clone(), {name: values.clone() for name, values in view.state.items()}
        parameters, gradients, *buffers = (
            [*view.flat.views(flat).values()] for flat in (weights, view.gradient, *state.values())
        )
        torch._fused_sgd_(
            parameters, gradients, [buffer for each in buffers for buffer in each], weight_decay=view.decay,
            momentum=self.momentum, lr=view.lr, dampening=0.0, nesterov=self.nesterov, maximize=False,
            is_first_step=False, grad_scale=view.lr.new_ones((), dtype=torch.float32),
        )  # fmt: skip
        return weights, state


def sgd_update(view: StepView, gradient: Tensor, momentum: float, nesterov: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """A step along a gradient, with momentum if the state holds any; the learning rate stays outside the momentum."""
    if "momentum" not in view.state:
        return view.descend(gradient), {}
    buffer = gradient.add(view.state["momentum"], alpha=momentum)
    direction = gradient.add(buffer, alpha=momentum) if nesterov else buffer
    return view.descend(direction), {"momentum": buffer}
