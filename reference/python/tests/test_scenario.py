"""Scenarios are read strictly."""

from __future__ import annotations

import json

import pytest
from conftest import small_document

from errors import InputError
from scenario import SCHEMA, Scenario, load_scenario, scenario_from_json, scenario_to_json


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


@pytest.mark.parametrize("kind", ["mlp", "transformer"])
def test_to_json_and_back_is_the_same(kind):
    scenario = scenario_from_json(small_document(kind))
    document = json.loads(json.dumps(scenario_to_json(scenario)))
    assert document["schema"] == SCHEMA
    assert scenario_from_json(document) == scenario


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"schema": "shardproof.scenario/2"},
            'schema is "shardproof.scenario/2"; wanted: "shardpr',
        ),
        ({"colour": 1}, "colour is no field"),
        ({"model__depth": 1}, "model.depth is no field"),
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
        ({"dtype": "float16"}, 'dtype is "float16"'),
        ({"max_norm": -0.5}, "max_norm is -0.5"),
        ({"micro_batches": 0}, "micro_batches is 0"),
        ({"steps": 0}, "steps is 0"),
    ],
)
def test_a_wrong_field_is_named(changes, message):
    with pytest.raises(InputError, match=message):
        scenario_from_json(small_document("mlp", **changes))


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
