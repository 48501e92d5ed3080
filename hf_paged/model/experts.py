"""Experts of the engine's forwards on CPU: those that have tokens, multiplied by our kernel where their weights lie.

For modules that transformers also computes by `grouped_mm`: their parameters lie as its decorator says.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_paged.kernels import cpu_linear
from hf_paged.kernels.cpu_linear import CPULinear
from hf_paged.kernels.layers import InputError, LayerKernels, plainly
from hf_paged.model.exact_operations import ExactOperations
from hf_paged.model.fused_layers import ACTIVATIONS, agrees_where_finite, attempt, computes, is_as_tried
from hf_paged.model.module_overrides import ModuleOverride, Survey, has_hooks, is_library_code, is_untouched

_SETTINGS = ("has_gate", "has_bias", "is_transposed")


class Experts(ModuleOverride):
    """Experts with their weights side by side in `[experts, ...]`, called with rows, choices and their shares.

    A row's result depends, bit for bit, on that row alone.

    Attributes:
        kernel: What multiplies.
        kernels: For the gate; `None`: the module's own is called.
        coefficients: Of `activation`, for `kernels`.
    """

    __slots__ = ("activation", "coefficients", "kernel", "kernels", "operations")

    def __init__(self, module: Any, kernel: CPULinear, kernels: LayerKernels | None) -> None:
        super().__init__(module)
        self.kernel = kernel
        self.operations = ExactOperations()
        self.activation = getattr(module, "act_fn", None)
        found = next((c for c in ACTIVATIONS if computes(self.activation, c)), None)
        self.kernels = kernels if found is not None and module.has_gate else None
        self.coefficients = found or (0.0, 0.0)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 3 and not kwargs:
            try:
                return self.compute_rows(*args)
            except InputError:
                pass
        return self.module._call_impl(*args, **kwargs)

    def compute_rows(self, states: Tensor, choices: Tensor, shares: Tensor) -> Tensor:
        """The module's result: `choices` and `shares`, `[rows, k]`, say which experts and how much of each.

        Raises:
            InputError: The module computes that itself.
        """
        expert_ids, order = choices.flatten().sort()
        ids, counts = (found.tolist() for found in expert_ids.unique_consecutive(return_counts=True))
        name = "gate_up_proj" if self.module.has_gate else "up_proj"
        hidden = self._gated(self._multiply(name, states[order // choices.shape[1]], expert_ids, ids, counts))
        result = self._multiply("down_proj", hidden, expert_ids, ids, counts)
        if getattr(self.module, "has_post_expert_norm", False):  # transformers 5.17 knows none
            result = self.module.post_expert_norm(result)
        result = result * shares.flatten()[order].unsqueeze(-1)
        of_rows = torch.empty_like(result).index_copy_(0, order, result)
        return of_rows.unflatten(0, choices.shape).sum(dim=1).to(states.dtype)

    def _multiply(self, name: str, states: Tensor, expert_ids: Tensor, ids: list[int], counts: list[int]) -> Tensor:
        module, own = self.module, self.module._parameters
        weight, bias = own.get(name), own.get(f"{name}_bias")
        if type(weight) is not nn.Parameter or (type(bias) is not nn.Parameter) == module.has_bias:
            raise InputError("experts", "weights and biases that are parameters")
        weight = weight.detach().mT if module.is_transposed else weight.detach()
        parts = zip(ids, states.split(counts), strict=True)
        with plainly():
            result = torch.cat([self.kernel.multiply(rows, weight[index], None) for index, rows in parts])
        return result if bias is None else result.add_(bias.detach()[expert_ids])  # to what is rounded, as theirs is

    def _gated(self, states: Tensor) -> Tensor:
        module = self.module
        if self.kernels is not None and is_as_tried(module, "act_fn", self.activation):
            gate, up = states.chunk(2, dim=-1)
            return self.kernels.gate(gate, up, *self.coefficients)
        with self.operations:
            result: Tensor = module._apply_gate(states) if module.has_gate else module.act_fn(states)
        return result


def find_experts(module: Any, survey: Survey) -> Experts | None:
    """For experts with ordinary weights on CPU, tried on a few rows: by the gate's kernel, else with their own gate."""
    weight = module._parameters.get("down_proj")
    if type(weight) is not nn.Parameter or weight.ndim != 3 or not weight.is_cpu or not is_untouched(module):
        return None
    is_known = all(isinstance(getattr(module, name, None), bool) for name in _SETTINGS)
    if not is_known or getattr(module, "_is_expert_parallel", False):  # transformers 5.17 lacks it
        return None
    kernel = cpu_linear.load(weight.dtype)
    if isinstance(kernel, str) or not all(is_library_code(part) and not has_hooks(part) for part in module.modules()):
        return None
    width = weight.shape[2 if module.is_transposed else 1]
    states = torch.randn(4, width, generator=survey.generator, device="cpu").to(weight.dtype)
    choices = torch.randint(len(weight), (4, 2), generator=survey.generator, device="cpu")
    shares = torch.rand(4, 2, generator=survey.generator, device="cpu").to(weight.dtype)
    truth = attempt(module, states, choices, shares)
    for kernels in (survey.kernels, None):
        experts = Experts(module, kernel, kernels)
        result = attempt(experts.compute_rows, states, choices, shares)
        if isinstance(result, Tensor) and isinstance(truth, Tensor) and agrees_where_finite(result, truth):
            return experts
    return None
