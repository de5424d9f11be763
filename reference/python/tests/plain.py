"""The models as plain functions of named weights: a second way to write them. A weight that computes
is a leaf in the dtype it computes in."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from data import Dataset
from scenario import Scenario

Weights = dict[str, Tensor]
Record = Callable[[str, Tensor], None]


def mlp(scenario: Scenario, w: Weights, x: Tensor, record: Record) -> Tensor:
    count = len(scenario.model.sizes) - 1
    for i in range(count):
        x = F.linear(x, w[f"layers.{i}.linear.weight"], w[f"layers.{i}.linear.bias"])
        if i < count - 1:
            x = F.gelu(x)
        record(f"layers.{i}", x)
    return x


def transformer(scenario: Scenario, w: Weights, ids: Tensor, record: Record) -> Tensor:
    width, heads = scenario.model.width, scenario.model.heads
    batch, context = ids.shape

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def norm(x: Tensor, name: str) -> Tensor:
        weight, bias = w[f"{name}.weight"], w[f"{name}.bias"]
        return F.layer_norm(x.to(weight.dtype), (width,), weight, bias, 1e-5).to(x.dtype)

    def split(x: Tensor) -> Tensor:
        return x.view(batch, context, heads, width // heads).transpose(1, 2)

    tokens, places = w["token_embedding.weight"], w["position_embedding.weight"]
    x = F.embedding(ids, tokens) + F.embedding(torch.arange(context), places)
    mask = torch.ones(context, context, dtype=torch.bool).triu(1)
    for i in range(scenario.model.layers):
        block = f"blocks.{i}"
        parts = linear(norm(x, f"{block}.norm1"), f"{block}.attention.qkv").chunk(3, -1)
        q, k, v = (split(part) for part in parts)
        scores = (q @ k.transpose(-2, -1)) * (1 / math.sqrt(width // heads))
        weights = scores.masked_fill(mask, -math.inf).softmax(-1)
        mixed = (weights @ v).transpose(1, 2).reshape(batch, context, width)
        x = x + linear(mixed, f"{block}.attention.output")
        hidden = F.gelu(linear(norm(x, f"{block}.norm2"), f"{block}.mlp.up"))
        x = x + linear(hidden, f"{block}.mlp.down")
        record(block, x)
    head = tokens if scenario.model.tied else w["head.weight"]
    return F.linear(norm(x, "norm"), head)


def quirks(scenario: Scenario, w: Weights, x: Tensor, record: Record) -> Tensor:
    spec, has = scenario.model, set(scenario.model.quirks)
    last = spec.depth - 1
    shift = torch.tensor([(k + 1) / 64 for k in range(spec.quirk_width)], dtype=torch.float64)
    shift = shift.to(scenario.torch_dtype).to(scenario.buffer_dtype)
    for i in range(spec.depth):
        source = 0 if i == last and "tied_across" in has else i
        weight, bias = w[f"layers.{source}.linear.weight"], w[f"layers.{i}.linear.bias"]
        for call in range(1 if i == last or "twice" not in has else 2):
            y = F.linear(x, weight, bias)
            y = F.linear(y, weight) if "tied_inside" in has else y
            y = y + shift.to(x.dtype) if "buffer" in has else y
            y = F.gelu(y) if i < last else y
            y = y * w[f"layers.{i}.gain"] if "scalar" in has else y
            record(f"layers.{i}" + ("+1" if call else ""), y)
            x = y + x * 0.5 if "tuple" in has else y
    return x


class RankResult:
    """Loss, outputs and gradients of one rank's micro-batch, before any reduction."""

    def __init__(
        self, scenario: Scenario, weights: Weights, step: int, micro_batch: int, rank: int
    ) -> None:
        self.outputs: dict[str, Tensor] = {}
        self.leaves = {name: self._leaf(scenario, name, value) for name, value in weights.items()}
        input, target = Dataset(scenario).batch(step, micro_batch, rank)
        if input.is_floating_point():
            input = input.to(scenario.parameter_dtype)
        self.loss = self._loss(scenario, input, target, "")
        if "two_forwards" in scenario.model.quirks:
            self.loss = self.loss + self._loss(scenario, input * 0.5, target, "#2")
        scaled = self.loss
        if scenario.micro_batches > 1:
            scaled = scaled / scenario.micro_batches
        if scenario.loss_scale > 0:
            scaled = scaled * scenario.loss_scale
        scaled.backward()
        self.gradients = {
            name: leaf.grad for name, leaf in self.leaves.items() if leaf.grad is not None
        }

    def _leaf(self, scenario: Scenario, name: str, value: Tensor) -> Tensor:
        has, dtype = set(scenario.model.quirks), scenario.parameter_dtype
        if scenario.precision.exempt_norms and "norm" in name:
            dtype = scenario.torch_dtype
        value = value.detach().to(dtype, copy=True)
        freeze = ("frozen_bias" in has and name.endswith("linear.bias")) or (
            "frozen_layer" in has and name.startswith("layers.1.")
        )
        return value.requires_grad_(not freeze)

    def _loss(self, scenario: Scenario, input: Tensor, target: Tensor, suffix: str) -> Tensor:
        def record(name: str, value: Tensor) -> None:
            layer, plus, call = name.partition("+")
            self.outputs[layer + suffix + plus + call] = value.detach().clone()

        kinds = {"mlp": mlp, "transformer": transformer, "quirks": quirks}
        output = kinds[scenario.model.kind](scenario, self.leaves, input, record)
        if scenario.precision.output:
            output = output.to(scenario.output_dtype)
        record("model", output)
        if scenario.model.kind == "transformer":
            return F.cross_entropy(output.flatten(0, 1), target.flatten())
        return F.mse_loss(output, target.to(output.dtype))
