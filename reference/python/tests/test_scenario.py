"""Scenarios are read strictly."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from conftest import small_document, small_scenario, weights_of

from errors import InputError
from scenario import QUIRKS, SCHEMA, Scenario, load_scenario, scenario_from_json, scenario_to_json
from trainer import Trainer


def test_missing_fields_take_the_defaults_of_the_header():
    scenario = scenario_from_json({"data": {"corpus": ["x"]}})
    model = scenario.model
    assert (model.kind, model.layers, model.width, model.heads) == ("transformer", 4, 256, 8)
    assert (model.context, model.vocabulary, model.dropout) == (64, 256, 0)
    assert (scenario.world_size, scenario.batch, scenario.micro_batches) == (4, 4, 1)
    assert (scenario.steps, scenario.max_norm, scenario.dtype) == (20, 1.0, "float32")
    optimizer = scenario.optimizer
    assert (optimizer.kind, optimizer.lr, optimizer.weight_decay) == ("adamw", 1e-3, 0.01)
    assert (optimizer.beta1, optimizer.beta2, optimizer.eps) == (0.9, 0.999, 1e-8)


def test_new_fields_have_defaults_that_change_nothing():
    scenario = scenario_from_json(small_document())
    assert (scenario.strategy, scenario.replicas, scenario.accumulation) == (
        "full_shard",
        1,
        "each",
    )
    assert (scenario.norm_type, scenario.loss_scale, scenario.construction) == (2, 0, "plain")
    precision, schedule = scenario.precision, scenario.schedule
    assert {precision.parameter, precision.reduce, precision.output, precision.buffer} == {""}
    assert precision.exempt_norms is False and scenario.model.tied is False
    assert (scenario.divide.pre, scenario.divide.post) == (0, 0)
    assert (schedule.reshard_after_forward, schedule.forward_prefetch) == (-1, 0)
    assert (schedule.backward_prefetch, schedule.limit_gathers) == ("pre", 0)
    model = scenario.model
    assert (model.depth, model.quirk_width, model.quirks) == (3, 8, ())


EVERYTHING = {
    "strategy": "hybrid_shard_zero2",
    "world_size": 8,
    "replicas": 2,
    "precision": {
        "parameter": "bfloat16",
        "reduce": "float16",
        "output": "float32",
    },
    "accumulation": "last_all_reduce",
    "micro_batches": 2,
    "norm_type": "inf",
    "divide": {"pre": 0.5, "post": 3},
    "schedule": {
        "reshard_after_forward": 2,
        "forward_prefetch": 8,
        "backward_prefetch": "none",
        "limit_gathers": 3,
    },
    "checkpointing": {"layers": "alternate", "order": "around", "early_stop": False},
    "construction": "meta",
    "loss_scale": 1024,
}


@pytest.mark.parametrize("kind", ["mlp", "transformer", "quirks"])
@pytest.mark.parametrize("changes", [{}, EVERYTHING], ids=["few", "all"])
def test_to_json_and_back_is_the_same(kind, changes):
    asked = small_document(kind, **copy.deepcopy(changes))
    if changes and kind == "transformer":
        asked["precision"]["exempt_norms"] = True
        asked["model"]["tied"] = True
    if changes and kind == "quirks":
        asked["precision"]["buffer"] = "float64"
        asked["model"].update(depth=4, quirk_width=5, quirks=list(QUIRKS))
    scenario = scenario_from_json(asked)
    document = json.loads(json.dumps(scenario_to_json(scenario), allow_nan=False))
    assert document["schema"] == SCHEMA
    for name, value in asked.items():
        if isinstance(value, dict):
            assert document[name] == {**document[name], **value}
        else:
            assert document[name] == value
    assert scenario_from_json(document) == scenario


def test_quirks_stand_in_their_order():
    document = small_document("quirks", model__quirks=["two_forwards", "scalar", "tied_inside"])
    scenario = scenario_from_json(document)
    assert scenario.model.quirks == ("tied_inside", "scalar", "two_forwards")
    assert scenario_to_json(scenario)["model"]["quirks"] == scenario.model.quirks
    assert scenario_from_json(small_document("quirks", model__quirks=list(QUIRKS)))


def test_norm_types_are_numbers_or_infinity():
    for value, norm_type in ((1, 1), (2.5, 2.5), ("inf", math.inf)):
        assert scenario_from_json(small_document(norm_type=value)).norm_type == norm_type


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"strategy": "zero4"},
            'strategy is "zero4"; wanted: "full_shard", "shard_grad_op", "no_sh',
        ),
        ({"replicas": 2}, 'replicas is 2; wanted: 1 for strategy "full_shard"'),
        ({"strategy": "shard_grad_op", "replicas": 2}, "replicas is 2; wanted: 1 for strategy"),
        ({"strategy": "no_shard", "replicas": 2}, "replicas is 2; wanted: 1 for strategy"),
        ({"strategy": "hybrid_shard", "replicas": 4}, "replicas is 4; wanted: a divisor of world"),
        ({"strategy": "hybrid_shard", "replicas": 0}, "replicas is 0; wanted: a divisor of world"),
        (
            {"strategy": "hybrid_shard", "replicas": -1},
            "replicas is -1; wanted: a divisor of world",
        ),
        ({"replicas": 1.0}, "replicas is 1.0; wanted: an integer"),
        ({"precision": {"parameter": "float8"}}, 'precision.parameter is "float8"; wanted: "", "'),
        ({"precision": {"reduce": "half"}}, 'precision.reduce is "half"'),
        ({"precision": {"output": "int64"}}, 'precision.output is "int64"'),
        ({"precision": {"buffer": 16}}, "precision.buffer is 16; wanted: a string"),
        ({"precision": {"exempt_norms": 1}}, "precision.exempt_norms is 1; wanted: true or false"),
        ({"precision": {"norms": True}}, "precision.norms is no field"),
        ({"precision": "bfloat16"}, 'precision is "bfloat16"; wanted: a JSON object'),
        (
            {"accumulation": "first", "micro_batches": 2},
            'accumulation is "first"; wanted: "each", ',
        ),
        ({"accumulation": "last"}, 'accumulation is "last"; wanted: "each" of one micro-batch'),
        (
            {"accumulation": "last_all_reduce", "strategy": "hybrid_shard"},
            'accumulation is "last_all_reduce"; wanted: "each" of one micro-batch',
        ),
        (
            {"accumulation": "last_all_reduce", "micro_batches": 2, "strategy": "no_shard"},
            'accumulation is "last_all_reduce"; wanted: another for strategy "no_shard"',
        ),
        ({"norm_type": 0}, 'norm_type is 0.0; wanted: a number from 0.1 to 64, or "inf"'),
        ({"norm_type": -1}, "norm_type is -1"),
        ({"norm_type": "two"}, 'norm_type is "two"; wanted: a number, or "inf"'),
        ({"norm_type": True}, "norm_type is true; wanted: a number"),
        ({"max_norm": "inf"}, 'max_norm is "inf"; wanted: a number'),
        ({"divide": {"pre": 2}}, "divide.post is 0.0; wanted: above 0, because divide.pre is"),
        ({"divide": {"pre": -1, "post": 2}}, "divide.pre is -1.0; wanted: at least 0"),
        ({"divide": {"post": -2}}, "divide.post is -2.0; wanted: at least 0"),
        ({"divide": {"by": 2}}, "divide.by is no field"),
        ({"schedule": {"reshard_after_forward": -2}}, "schedule.reshard_after_forward is -2"),
        (
            {"schedule": {"reshard_after_forward": 4}, "world_size": 6},
            "schedule.reshard_after_forward is 4; wanted: .* a divisor of the number of shards, 6",
        ),
        (
            {
                "schedule": {"reshard_after_forward": 4},
                "strategy": "hybrid_shard",
                "world_size": 4,
                "replicas": 2,
            },
            "a divisor of the number of shards, 2",
        ),
        (
            {"schedule": {"reshard_after_forward": 2}, "strategy": "no_shard"},
            "a divisor of the number of shards, 1",
        ),
        ({"schedule": {"forward_prefetch": 9}}, "schedule.forward_prefetch is 9; wanted: 0 to 8"),
        ({"schedule": {"forward_prefetch": -1}}, "schedule.forward_prefetch is -1"),
        (
            {"schedule": {"backward_prefetch": ""}},
            'schedule.backward_prefetch is ""; wanted: "pre"',
        ),
        ({"checkpointing": {"layers": "some"}}, 'checkpointing.layers is "some"; wanted: "none"'),
        (
            {"checkpointing": {"layers": "segments"}},
            'checkpointing.layers is "segments"; wanted: another for model.kind "mlp"',
        ),
        (
            {"checkpointing": {"layers": "all", "order": "outside"}},
            'checkpointing.order is "outside"; wanted: "inside"',
        ),
        (
            {"checkpointing": {"order": "around"}},
            'checkpointing.order is "around"; wanted: "inside" for checkpointing.layers "none"',
        ),
        (
            {"checkpointing": {"layers": "all", "order": "around"}, "wrap": "model"},
            'checkpointing.order is "around"; wanted: "inside" for wrap "model"',
        ),
        (
            {"checkpointing": {"early_stop": False}},
            "checkpointing.early_stop is false; wanted: true",
        ),
        ({"checkpointing": {"early_stop": 0}}, "checkpointing.early_stop is 0"),
        ({"schedule": {"limit_gathers": -1}}, "schedule.limit_gathers is -1; wanted: at least 0"),
        ({"schedule": {"limit_gathers": True}}, "schedule.limit_gathers is true"),
        ({"construction": "lazy"}, 'construction is "lazy"; wanted: "plain", "meta", "sync"'),
        ({"loss_scale": -1}, "loss_scale is -1.0; wanted: at least 0"),
        ({"loss_scale": 1e300}, "loss_scale is 1e[+]300; wanted: a number that float32"),
        ({"loss_scale": 1e-300}, "loss_scale is 1e-300; wanted: a number that float32"),
        ({"model__tied": True}, 'model.tied is true; wanted: nothing, .* "transformer" has it'),
        (
            {"model__depth": 2},
            'model.depth is 2; wanted: nothing, because only model.kind "quirks"',
        ),
        ({"model__quirk_width": 2}, "model.quirk_width is 2; wanted: nothing"),
        ({"model__quirks": ["twice"]}, r'model.quirks is \["twice"\]; wanted: nothing'),
    ],
)
def test_a_wrong_new_field_is_named(changes, message):
    with pytest.raises(InputError, match=message):
        scenario_from_json(small_document("mlp", **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__depth": 0}, "model.depth is 0; wanted: at least 1"),
        ({"model__quirk_width": 0}, "model.quirk_width is 0; wanted: at least 1"),
        (
            {"model__quirks": ["slow"]},
            r'model.quirks is \["slow"\]; wanted: each at most once of t',
        ),
        ({"model__quirks": ["twice", "twice"]}, "model.quirks is .* each at most once"),
        ({"model__quirks": ["twice", 1]}, r"model.quirks\[1\] is 1; wanted: a string"),
        *(
            ({"model__quirks": [quirk], "model__depth": 1}, "model.depth is 1; wanted: at least 2")
            for quirk in ("tied_across", "twice", "frozen_layer")
        ),
        (
            {"model__quirks": ["tied_across", "frozen_layer"], "model__depth": 2},
            "model.depth is 2; wanted: at least 3 for these model.quirks",
        ),
        ({"precision": {"buffer": "bfloat16"}}, 'precision.buffer is "bfloat16"; wanted: nothing'),
        (
            {"precision": {"exempt_norms": True, "parameter": "bfloat16"}},
            "precision.exempt_norms is true; wanted: false without norms",
        ),
        ({"model__sizes": [4, 4]}, "model.sizes"),
        ({"model__tied": True}, "model.tied"),
        (
            {"model__dropout": 0.1},
            'model.dropout is 0.1; .* only model.kind "transformer" and "mlp"',
        ),
        ({"data": {"kind": "bytes", "corpus": ["x"]}}, '"synthetic" for model.kind "quirks"'),
    ],
)
def test_a_wrong_field_of_the_quirks_model_is_named(changes, message):
    with pytest.raises(InputError, match=message):
        scenario_from_json(small_document("quirks", **changes))


def test_what_is_possible_at_the_edge_is_accepted():
    frozen = ["tied_across", "frozen_layer", "frozen_bias"]
    others = [each for each in QUIRKS if each not in ("tied_across", "twice", "frozen_layer")]
    for kind, changes in (
        ("quirks", {"model__quirks": frozen}),
        ("quirks", {"model__quirks": [*others, "twice", "tied_across"], "model__depth": 2}),
        ("quirks", {"model__quirks": others, "model__depth": 1}),
        ("transformer", {"precision": {"parameter": "float32"}}),
        ("mlp", {"strategy": "hybrid_shard", "replicas": 1, "world_size": 6}),
        ("mlp", {"strategy": "hybrid_shard", "replicas": 6, "world_size": 6}),
        ("mlp", {"schedule": {"reshard_after_forward": 1}, "strategy": "no_shard"}),
        ("mlp", {"schedule": {"reshard_after_forward": 3}, "world_size": 6}),
        ("mlp", {"checkpointing": {"layers": "alternate", "order": "around"}}),
        ("transformer", {"checkpointing": {"layers": "segments", "early_stop": False}}),
        ("mlp", {"divide": {"post": 0.25}}),
        ("mlp", {"micro_batches": 2, "accumulation": "last", "strategy": "no_shard"}),
    ):
        scenario_from_json(small_document(kind, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"strategy": "shard_grad_op"},
        {"schedule": {"forward_prefetch": 2, "limit_gathers": 1, "backward_prefetch": "post"}},
        {"schedule": {"reshard_after_forward": 0}},
        {"checkpointing": {"layers": "all", "order": "around", "early_stop": False}},
        {"construction": "meta"},
        {"construction": "sync"},
        {"wrap": "model"},
    ],
)
def test_what_is_about_sharding_only_changes_no_bits(changes):
    plain, changed = small_scenario(), small_scenario(**changes)
    assert plain != changed
    traces = [Trainer(each, weights_of(plain)).step(0) for each in (plain, changed)]
    for one, other in zip(*(trace.tensors for trace in traces), strict=True):
        assert (one.quantity, one.name) == (other.quantity, other.name)
        for a, b in zip(one.pieces, other.pieces, strict=True):
            assert torch.equal(a.values, b.values)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"schema": "shardproof.scenario/2"},
            'schema is "shardproof.scenario/2"; wanted: "shardpr',
        ),
        ({"colour": 1}, "colour is no field"),
        ({"model__colour": 1}, "model.colour is no field"),
        ({"model": [1]}, r"model is \[1\]; wanted: a JSON object"),
        ({"model__kind": "cnn"}, 'model.kind is "cnn"'),
        ({"model__sizes": [3]}, "model.sizes"),
        ({"model__sizes": [3, 0]}, "model.sizes"),
        ({"model__sizes": [3, "4"]}, r'model.sizes\[1\] is "4"; wanted: an integer'),
        ({"model__layers": 2}, 'only model.kind "transformer" has it'),
        ({"model__dropout": 1}, "model.dropout is 1.0"),
        ({"data": {"kind": "bytes", "corpus": ["x"]}}, "data.kind"),
        ({"data__corpus": ["x"]}, "data.corpus"),
        ({"optimizer__momentum": 0.9}, "optimizer.momentum"),
        ({"optimizer__lr": -1}, "optimizer.lr is -1"),
        ({"optimizer__lr": "fast"}, 'optimizer.lr is "fast"; wanted: a number'),
        ({"optimizer__beta2": 1}, "optimizer.beta2 is 1"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"world_size": 0}, "world_size is 0; wanted: 1 to 512"),
        ({"world_size": True}, "world_size is true; wanted: an integer"),
        ({"world_size": 2.0}, "world_size is 2.0; wanted: an integer"),
        ({"dtype": "float8"}, 'dtype is "float8"'),
        ({"max_norm": -0.5}, "max_norm is -0.5"),
        ({"micro_batches": 0}, "micro_batches is 0"),
        ({"steps": 0}, "steps is 0"),
    ],
)
def test_a_wrong_field_is_named(changes, message):
    with pytest.raises(InputError, match=message):
        scenario_from_json(small_document("mlp", **changes))


def test_exempt_norms_need_mixed_precision():
    for precision in ({}, {"parameter": "float32"}, {"reduce": "bfloat16"}):
        document = small_document("transformer", precision={**precision, "exempt_norms": True})
        with pytest.raises(InputError, match="precision.exempt_norms is true; wanted: false"):
            scenario_from_json(document)


def test_heads_divide_the_width_and_bytes_need_their_vocabulary():
    with pytest.raises(InputError, match="model.heads is 3; wanted: a divisor of model.width, 16"):
        scenario_from_json(small_document("transformer", model__heads=3))
    data = {"kind": "bytes", "corpus": ["x"]}
    with pytest.raises(InputError, match="model.vocabulary is 32; wanted: at least 256"):
        scenario_from_json(small_document("transformer", data=data))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"seed": 1,\n "steps" 2}', "line 2, column 10: not JSON"),
        ('{"seed": 1, "seed": 2}', "the field 'seed' stands twice"),
        ('{"max_norm": NaN}', "NaN is not a JSON number"),
        ("[]", "wanted: a JSON object"),
        ("\xff", "cannot read the scenario"),
    ],
)
def test_a_file_that_is_no_scenario_is_named(tmp_path, text, message):
    file = tmp_path / "scenario.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match=message) as raised:
        load_scenario(file)
    assert str(file) in str(raised.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match="nowhere.json"):
        load_scenario(tmp_path / "nowhere.json")


def test_scenarios_are_values():
    assert scenario_from_json(small_document()) == scenario_from_json(small_document())
    assert scenario_from_json(small_document()) != Scenario()
