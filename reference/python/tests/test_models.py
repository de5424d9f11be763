"""The models, held to the page: names, shapes, and the formulas written out as one expression."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import small_scenario, weights_of
from torch.nn import functional as F

from data import Dataset
from models import Model, make_model


def loaded(scenario) -> tuple[Model, dict[str, torch.Tensor]]:
    model, weights = make_model(scenario), weights_of(scenario)
    model.load_state_dict(weights)
    return model, weights


def test_parameters_of_the_mlp():
    named = make_model(small_scenario("mlp")).named_parameters()
    assert {name: tuple(parameter.shape) for name, parameter in named} == {
        "layers.0.linear.weight": (20, 12),
        "layers.0.linear.bias": (20,),
        "layers.1.linear.weight": (7, 20),
        "layers.1.linear.bias": (7,),
    }


def test_parameters_of_the_transformer_and_their_order():
    model = make_model(small_scenario("transformer", model__layers=1, dtype="float64"))
    assert [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()] == [
        ("token_embedding.weight", (32, 16)),
        ("position_embedding.weight", (8, 16)),
        ("blocks.0.norm1.weight", (16,)),
        ("blocks.0.norm1.bias", (16,)),
        ("blocks.0.attention.qkv.weight", (48, 16)),
        ("blocks.0.attention.qkv.bias", (48,)),
        ("blocks.0.attention.output.weight", (16, 16)),
        ("blocks.0.attention.output.bias", (16,)),
        ("blocks.0.norm2.weight", (16,)),
        ("blocks.0.norm2.bias", (16,)),
        ("blocks.0.mlp.up.weight", (64, 16)),
        ("blocks.0.mlp.up.bias", (64,)),
        ("blocks.0.mlp.down.weight", (16, 64)),
        ("blocks.0.mlp.down.bias", (16,)),
        ("norm.weight", (16,)),
        ("norm.bias", (16,)),
        ("head.weight", (32, 16)),
    ]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}


def test_the_default_transformer_has_its_known_number_of_parameters():
    width, layers, vocabulary, context = 256, 4, 256, 64
    block = 12 * width**2 + 13 * width
    expected = layers * block + 2 * vocabulary * width + context * width + 2 * width
    model = make_model(small_scenario("transformer", model={"kind": "transformer"}))
    assert sum(parameter.numel() for parameter in model.parameters()) == expected == 3_307_008


def test_the_mlp_is_its_formula():
    scenario = small_scenario("mlp", dtype="float64")
    model, w = loaded(scenario)
    x, target = Dataset(scenario).batch(0, 0, 0)
    hidden = x @ w["layers.0.linear.weight"].T + w["layers.0.linear.bias"]
    hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
    expected = hidden @ w["layers.1.linear.weight"].T + w["layers.1.linear.bias"]
    output = model(x)
    torch.testing.assert_close(output, expected, rtol=1e-13, atol=1e-13)
    mean_square = ((expected - target) ** 2).sum() / target.numel()
    torch.testing.assert_close(model.loss(output, target), mean_square, rtol=1e-13, atol=0)


def transformer_by_hand(w, ids, heads, layers):
    """One sample [context], head by head and position by position."""

    def normalised(x, name):
        centred = x - x.mean(-1, keepdim=True)
        scale = (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        return centred * scale * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    x = w["token_embedding.weight"][ids] + w["position_embedding.weight"][: len(ids)]
    width = x.shape[-1]
    size = width // heads
    for i in range(layers):
        qkv = linear(normalised(x, f"blocks.{i}.norm1"), f"blocks.{i}.attention.qkv")
        mixed = torch.zeros_like(x)
        for head in range(heads):
            part = slice(head * size, (head + 1) * size)
            q, k, v = (qkv[:, n * width : (n + 1) * width][:, part] for n in range(3))
            for t in range(len(ids)):
                weights = torch.softmax(q[t] @ k[: t + 1].T / math.sqrt(size), -1)
                mixed[t, part] = weights @ v[: t + 1]
        x = x + linear(mixed, f"blocks.{i}.attention.output")
        hidden = linear(normalised(x, f"blocks.{i}.norm2"), f"blocks.{i}.mlp.up")
        x = x + linear(F.gelu(hidden), f"blocks.{i}.mlp.down")
    return normalised(x, "norm") @ w["head.weight"].T


def test_the_transformer_is_its_formula():
    scenario = small_scenario("transformer", dtype="float64")
    model, w = loaded(scenario)
    ids, target = Dataset(scenario).batch(0, 0, 0)
    output = model(ids)
    expected = torch.stack([transformer_by_hand(w, row, heads=2, layers=2) for row in ids])
    torch.testing.assert_close(output, expected, rtol=1e-11, atol=1e-11)
    chosen = torch.log_softmax(expected, -1).gather(-1, target.unsqueeze(-1))
    torch.testing.assert_close(model.loss(output, target), -chosen.mean(), rtol=1e-12, atol=0)


def test_gradients_are_those_of_the_formula():
    scenario = small_scenario("transformer", dtype="float64")
    model, w = loaded(scenario)
    ids, target = Dataset(scenario).batch(0, 0, 0)
    model.loss(model(ids), target).backward()
    for value in w.values():
        value.requires_grad_()
    output = torch.stack([transformer_by_hand(w, row, heads=2, layers=2) for row in ids])
    F.cross_entropy(output.flatten(0, 1), target.flatten()).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, w[name].grad, rtol=1e-9, atol=1e-12, msg=name)


def test_no_position_sees_a_later_one():
    scenario = small_scenario("transformer")
    model, _ = loaded(scenario)
    ids, _ = Dataset(scenario).batch(0, 0, 0)
    changed = ids.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 32
    before, after = model(ids), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert (before[:, 5:] != after[:, 5:]).any(-1).all()


def test_dropout_draws_its_mask_from_the_generator_it_is_given():
    scenario = small_scenario("mlp", model__dropout=0.25)
    model, w = loaded(scenario)
    x, _ = Dataset(scenario).batch(0, 0, 0)
    model.set_generator(torch.Generator().manual_seed(5))
    output = model(x)
    same = torch.Generator().manual_seed(5)
    hidden = F.gelu(F.linear(x, w["layers.0.linear.weight"], w["layers.0.linear.bias"]))
    mask = torch.empty_like(hidden).bernoulli_(0.75, generator=same).div_(0.75)
    assert mask.unique().tolist() == pytest.approx([0, 4 / 3])
    last = F.linear(hidden * mask, w["layers.1.linear.weight"], w["layers.1.linear.bias"])
    assert torch.equal(output, last)  # nothing is dropped after the last layer


def test_the_transformer_drops_at_its_four_places_in_order():
    scenario = small_scenario("transformer", model__dropout=0.1, model__layers=1)
    model, _ = loaded(scenario)
    ids, _ = Dataset(scenario).batch(0, 0, 0)
    shapes: list[tuple[int, ...]] = []
    for module in model.modules():
        if type(module).__name__ == "Dropout":
            module.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
    model.set_generator(torch.Generator().manual_seed(0))
    model(ids)
    # Embeddings, attention weights, attention's output, the MLP's output.
    assert shapes == [(3, 8, 16), (3, 2, 8, 8), (3, 8, 16), (3, 8, 16)]


def test_without_dropout_nothing_is_drawn():
    scenario = small_scenario("transformer")
    model, _ = loaded(scenario)
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    model.set_generator(generator)
    model(Dataset(scenario).batch(0, 0, 0)[0])
    assert torch.equal(generator.get_state(), before)
