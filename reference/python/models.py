"""The models, as plain torch.nn modules. Names of modules and parameters, and the order of the
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


class LayerNorm(nn.LayerNorm):
    """One that is exempt from mixed precision keeps its parameters' dtype and computes in it."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=1e-5)
        self.exempt = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.exempt:
            return super().forward(x)
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # Of what is returned; None: as it was computed.
        self.output_dtype: torch.dtype | None = None

    def forward(self, input: Tensor) -> Tensor:
        output = self.computed(input)
        return output if self.output_dtype is None else output.to(self.output_dtype)

    def computed(self, input: Tensor) -> Tensor:
        """The output before it is cast."""
        raise NotImplementedError

    def layers_by_name(self) -> dict[str, nn.Module]:
        """The layers whose outputs are recorded, in execution order."""
        raise NotImplementedError

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        raise NotImplementedError

    def forward_inputs(self, input: Tensor) -> list[Tensor]:
        """What the model is called with for one loss, the sum of the calls' losses."""
        return [input]

    def never_used(self) -> set[str]:
        """Parameters that get no gradient although they are not frozen."""
        return set()

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

    def computed(self, input: Tensor) -> Tensor:
        x = input
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
        self.norm1 = LayerNorm(spec.width)
        self.attention = Attention(spec)
        self.norm2 = LayerNorm(spec.width)
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
        self.norm = LayerNorm(spec.width)
        self.head = nn.Linear(spec.width, spec.vocabulary, bias=False)
        if spec.tied:
            self.head.weight = self.token_embedding.weight

    def computed(self, input: Tensor) -> Tensor:
        positions = torch.arange(input.shape[1], device=input.device)
        x = self.dropout(self.token_embedding(input) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def layers_by_name(self) -> dict[str, nn.Module]:
        return {f"blocks.{i}": block for i, block in enumerate(self.blocks)}

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.view(-1, output.shape[-1]), target.view(-1))


class QuirksLayer(nn.Module):
    def __init__(self, spec: ModelSpec, last: bool) -> None:
        super().__init__()
        width, self.quirks, self.last = spec.quirk_width, spec.quirks, last
        if "scalar" in self.quirks:
            self.gain = nn.Parameter(torch.ones(()))
        self.linear = nn.Linear(width, width)
        if "transposed" in self.quirks:
            self.linear.weight = nn.Parameter(self.linear.weight.detach().t())
        if "tied_inside" in self.quirks:
            self.twin = nn.Linear(width, width, bias=False)
        if "unused" in self.quirks:
            self.spare = nn.Parameter(torch.zeros(3))
        if "buffer" in self.quirks:
            self.register_buffer("shift", torch.arange(1, width + 1) / 64)
        self.share(self.linear.weight)

    def share(self, weight: nn.Parameter) -> None:
        """Makes it the weight of everything in the layer."""
        self.linear.weight = weight
        if "tied_inside" in self.quirks:
            self.twin.weight = weight

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, list[Tensor]]:
        # However the weight lies, the kernel is that for contiguous ones.
        weight = self.linear.weight.contiguous()
        y = F.linear(x, weight, self.linear.bias)
        if "tied_inside" in self.quirks:
            y = F.linear(y, self.twin.weight.contiguous())
        if "buffer" in self.quirks:
            y = y + self.shift.to(y.dtype)
        if not self.last:
            y = F.gelu(y)
        if "scalar" in self.quirks:
            y = y * self.gain
        return (y, [x * 0.5]) if "tuple" in self.quirks else y


class Quirks(Model):
    """Linear layers with what is legal in a model but easily forgotten."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.quirks = spec.quirks
        self.layers = nn.ModuleList(
            QuirksLayer(spec, last=i == spec.depth - 1) for i in range(spec.depth)
        )
        if "tied_across" in self.quirks:
            self.layers[-1].share(self.layers[0].linear.weight)
        if "unused" in self.quirks:
            self.spare_layer = QuirksLayer(spec, last=False)
        if "buffer" in self.quirks:
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        if "frozen_bias" in self.quirks:
            for name, parameter in self.named_parameters():
                if name.endswith("linear.bias"):
                    parameter.requires_grad_(False)
        if "frozen_layer" in self.quirks and spec.depth > 1:
            self.layers[1].requires_grad_(False)

    def computed(self, input: Tensor) -> Tensor:
        if "buffer" in self.quirks:
            self.calls += 1
        x = input
        for layer in self.layers:
            for _ in range(2 if "twice" in self.quirks and not layer.last else 1):
                x = layer(x)
                if "tuple" in self.quirks:
                    y, (extra,) = x
                    x = y + extra
        return x

    def layers_by_name(self) -> dict[str, nn.Module]:
        return {f"layers.{i}": layer for i, layer in enumerate(self.layers)}

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target)

    def forward_inputs(self, input: Tensor) -> list[Tensor]:
        return [input, input * 0.5] if "two_forwards" in self.quirks else [input]

    def never_used(self) -> set[str]:
        names = (name for name, _ in self.named_parameters())
        return {n for n in names if n.startswith("spare_layer.") or n.endswith(".spare")}


@torch.no_grad()
def make_model(scenario: Scenario) -> Model:
    """The model that computes: in the dtype of mixed precision if there is one, with weights that
    are still to be replaced."""
    kinds: dict[str, type[Model]] = {"mlp": Mlp, "transformer": Transformer, "quirks": Quirks}
    model = kinds[scenario.model.kind](scenario.model)
    model.output_dtype = scenario.output_dtype
    exempt: set[nn.Parameter] = set()
    for module in model.modules():
        if isinstance(module, LayerNorm) and scenario.precision.exempt_norms:
            module.exempt = True
            exempt.update(module.parameters())
    for parameter in model.parameters():
        kept = parameter in exempt
        parameter.data = parameter.to(scenario.torch_dtype if kept else scenario.parameter_dtype)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.to(scenario.torch_dtype).to(scenario.buffer_dtype)
    return model
