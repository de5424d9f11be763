"""Scenarios: what to train, as a JSON object. The fields and their defaults are those of
reference/scenario.h; unknown fields are refused, so that a misspelt one is not ignored."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from errors import InputError

SCHEMA = "shardproof.scenario/1"

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class ModelSpec:
    kind: str = "transformer"
    layers: int = 4
    width: int = 256
    heads: int = 8
    context: int = 64
    vocabulary: int = 256
    sizes: tuple[int, ...] = (16, 32, 32, 8)
    dropout: float = 0.0


@dataclass(frozen=True)
class DataSpec:
    kind: str = "bytes"
    corpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class OptimizerSpec:
    kind: str = "adamw"
    lr: float = 1e-3
    momentum: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01


@dataclass(frozen=True)
class Scenario:
    model: ModelSpec = field(default_factory=ModelSpec)
    data: DataSpec = field(default_factory=DataSpec)
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    seed: int = 0
    world_size: int = 4
    strategy: str = "full_shard"
    wrap: str = "layer"
    dtype: str = "float32"
    max_norm: float = 1.0
    micro_batches: int = 1
    batch: int = 4
    steps: int = 20
    backend: str = "in_process"
    device: str = "cpu"

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


# Fields that only one kind of model, data or optimizer has. With another kind nobody reads them, so
# they must be left at their defaults.
_ONLY_FOR = {
    "transformer": ("layers", "width", "heads", "context", "vocabulary"),
    "mlp": ("sizes",),
    "bytes": ("corpus",),
    "sgd": ("momentum",),
    "adamw": ("beta1", "beta2", "eps"),
}

_SECTIONS = {"model": ModelSpec, "data": DataSpec, "optimizer": OptimizerSpec}


def load_scenario(path: Path) -> Scenario:
    """Reads and checks a scenario file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the scenario {path}: {error}") from error
    try:
        document = json.loads(
            text, object_pairs_hook=_object_of_unique_keys, parse_constant=_refuse_constant
        )
    except json.JSONDecodeError as error:
        raise InputError(
            f"{path}, line {error.lineno}, column {error.colno}: not JSON: {error.msg}"
        ) from error
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    try:
        return scenario_from_json(document)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def scenario_from_json(document: Any) -> Scenario:
    if not isinstance(document, dict):
        raise InputError(f"the scenario is {_shown(document)}; wanted: a JSON object")
    fields = dict(document)
    schema = fields.pop("schema", SCHEMA)
    if schema != SCHEMA:
        raise InputError(f'schema is {_shown(schema)}; wanted: "{SCHEMA}"')
    for name, section in _SECTIONS.items():
        if name in fields:
            fields[name] = _section_from_json(section, fields[name], name)
    scenario = _section_from_json(Scenario, fields, "")
    _validate(scenario)
    return scenario


def scenario_to_json(scenario: Scenario) -> dict[str, Any]:
    return {"schema": SCHEMA, **dataclasses.asdict(scenario)}


def _section_from_json(section: type, fields: Any, path: str) -> Any:
    if not isinstance(fields, dict):
        raise InputError(f"{path} is {_shown(fields)}; wanted: a JSON object")
    known = {each.name: each for each in dataclasses.fields(section)}
    for name in fields:
        if name not in known:
            raise InputError(
                f"{_joined(path, name)} is no field of a scenario; known here: {', '.join(known)}"
            )
    return section(
        **{
            name: _value_from_json(value, str(known[name].type), _joined(path, name))
            for name, value in fields.items()
        }
    )


def _value_from_json(value: Any, kind: str, path: str) -> Any:
    def wanted(what: str) -> InputError:
        return InputError(f"{path} is {_shown(value)}; wanted: {what}")

    if kind == "int":
        # JSON's true is an int to Python.
        if not isinstance(value, int) or isinstance(value, bool):
            raise wanted("an integer")
    elif kind == "float":
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise wanted("a number")
        value = float(value)
        if not math.isfinite(value):
            raise wanted("a finite number")
    elif kind == "str":
        if not isinstance(value, str):
            raise wanted("a string")
    elif kind.startswith("tuple"):
        element = "int" if "int" in kind else "str"
        if not isinstance(value, list):
            raise wanted("an array")
        value = tuple(
            _value_from_json(each, element, f"{path}[{index}]") for index, each in enumerate(value)
        )
    return value  # the sections have been converted before


def _validate(scenario: Scenario) -> None:
    def require(condition: bool, path: str, value: Any, wanted: str) -> None:
        if not condition:
            raise InputError(f"{path} is {_shown(value)}; wanted: {wanted}")

    model, data, optimizer = scenario.model, scenario.data, scenario.optimizer
    require(model.kind in ("mlp", "transformer"), "model.kind", model.kind, '"mlp", "transformer"')
    require(data.kind in ("bytes", "synthetic"), "data.kind", data.kind, '"bytes", "synthetic"')
    require(optimizer.kind in ("adamw", "sgd"), "optimizer.kind", optimizer.kind, '"adamw", "sgd"')
    for section, values in (("model", model), ("data", data), ("optimizer", optimizer)):
        for kind, names in _ONLY_FOR.items():
            for name in names:
                if kind != values.kind and hasattr(values, name):
                    value = getattr(values, name)
                    wanted = f'nothing, because only {section}.kind "{kind}" has it'
                    require(
                        value == getattr(type(values)(), name), f"{section}.{name}", value, wanted
                    )
    if model.kind == "mlp":
        require(len(model.sizes) >= 2, "model.sizes", model.sizes, "at least two sizes")
        require(min(model.sizes) >= 1, "model.sizes", model.sizes, "sizes of at least 1")
    else:
        for name in _ONLY_FOR["transformer"]:
            least = 2 if name == "vocabulary" else 1
            value = getattr(model, name)
            require(value >= least, f"model.{name}", value, f"at least {least}")
        require(
            model.width % model.heads == 0,
            "model.heads",
            model.heads,
            f"a divisor of model.width, {model.width}",
        )
    require(0 <= model.dropout < 1, "model.dropout", model.dropout, "0 <= dropout < 1")

    if data.kind == "bytes":
        require(model.kind == "transformer", "data.kind", data.kind, '"synthetic" for an mlp')
        require(len(data.corpus) >= 1, "data.corpus", data.corpus, "at least one file")
        require(model.vocabulary >= 256, "model.vocabulary", model.vocabulary, "at least 256")

    for name in ("lr", "momentum", "eps", "weight_decay"):
        value = getattr(optimizer, name)
        require(value >= 0, f"optimizer.{name}", value, "at least 0")
    for name in ("beta1", "beta2"):
        value = getattr(optimizer, name)
        require(0 <= value < 1, f"optimizer.{name}", value, "0 <= beta < 1")

    require(0 <= scenario.seed < 2**64, "seed", scenario.seed, "an unsigned 64-bit integer")
    require(1 <= scenario.world_size <= 512, "world_size", scenario.world_size, "1 to 512")
    require(scenario.strategy == "full_shard", "strategy", scenario.strategy, '"full_shard"')
    require(scenario.wrap in ("layer", "model"), "wrap", scenario.wrap, '"layer", "model"')
    require(scenario.dtype in DTYPES, "dtype", scenario.dtype, '"float32", "float64"')
    require(scenario.max_norm >= 0, "max_norm", scenario.max_norm, "at least 0 (0: no clipping)")
    for name in ("micro_batches", "batch", "steps"):
        value = getattr(scenario, name)
        require(value >= 1, name, value, "at least 1")


def _object_of_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise InputError(f"the field {name!r} stands twice in one object")
        found[name] = value
    return found


def _refuse_constant(name: str) -> Any:
    raise InputError(f"{name} is not a JSON number")


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)
