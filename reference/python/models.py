"""The two models, as plain torch.nn modules. Names of modules and parameters, and the order of the
operations, are those of reference/README.md."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scenario import ModelSpec, Scenario


class Dropout(nn.Module):
    """Draws from the generator of the rank that is being played. torch.nn.Dropout cannot: it knows
    only the process's default generator."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.generator: torch.Generator | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.p == 0:
            return x
        if self.generator is None:
            raise RuntimeError("dropout runs before a rank's generator was chosen")
        keep = 1 - self.p
        mask = torch.empty_like(x, requires_grad=False)
        mask.bernoulli_(keep, generator=self.generator).div_(keep)
        return x * mask


class Model(nn.Module):
    def layers_by_name(self) -> dict[str, nn.Module]:
        """The layers whose outputs are recorded, in execution order."""
        raise NotImplementedError

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        raise NotImplementedError

    def set_generator(self, generator: torch.Generator) -> None:
        for module in self.modules():
            if isinstance(module, Dropout):
                module.generator = generator


class MlpLayer(nn.Module):
    def __init__(self, inputs: int, outputs: int, dropout: float, last: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.dropout = Dropout(dropout)
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return x if self.last else self.dropout(F.gelu(x))


class Mlp(Model):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        count = len(spec.sizes) - 1
        self.layers = nn.ModuleList(
            MlpLayer(spec.sizes[i], spec.sizes[i + 1], spec.dropout, i == count - 1)
            for i in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def layers_by_name(self) -> dict[str, nn.Module]:
        return {f"layers.{i}": layer for i, layer in enumerate(self.layers)}

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target)


class Attention(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.heads = spec.heads
        self.qkv = nn.Linear(spec.width, 3 * spec.width)
        self.dropout = Dropout(spec.dropout)
        self.output = nn.Linear(spec.width, spec.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, context, width = x.shape
        head_width = width // self.heads
        q, k, v = (
            part.view(batch, context, self.heads, head_width).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        scores = torch.matmul(q, k.transpose(-2, -1)) * (1 / math.sqrt(head_width))
        future = torch.ones(context, context, dtype=torch.bool, device=x.device).triu(1)
        weights = self.dropout(scores.masked_fill(future, -math.inf).softmax(-1))
        mixed = torch.matmul(weights, v).transpose(1, 2).reshape(batch, context, width)
        return self.output(mixed)


class FeedForward(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.up = nn.Linear(spec.width, 4 * spec.width)
        self.down = nn.Linear(4 * spec.width, spec.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(spec.width, eps=1e-5)
        self.attention = Attention(spec)
        self.norm2 = nn.LayerNorm(spec.width, eps=1e-5)
        self.mlp = FeedForward(spec)
        self.dropout = Dropout(spec.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Transformer(Model):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(spec.vocabulary, spec.width)
        self.position_embedding = nn.Embedding(spec.context, spec.width)
        self.dropout = Dropout(spec.dropout)
        self.blocks = nn.ModuleList(Block(spec) for _ in range(spec.layers))
        self.norm = nn.LayerNorm(spec.width, eps=1e-5)
        self.head = nn.Linear(spec.width, spec.vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.dropout(self.token_embedding(ids) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def layers_by_name(self) -> dict[str, nn.Module]:
        return {f"blocks.{i}": block for i, block in enumerate(self.blocks)}

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.view(-1, output.shape[-1]), target.view(-1))


def make_model(scenario: Scenario) -> Model:
    """The model in the scenario's dtype, with weights that are still to be replaced."""
    build = Mlp if scenario.model.kind == "mlp" else Transformer
    return build(scenario.model).to(scenario.torch_dtype)
