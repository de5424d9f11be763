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

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

# In the order that they have in every model.quirks.
QUIRKS = (
    "tied_inside",
    "tied_across",
    "twice",
    "frozen_bias",
    "frozen_layer",
    "unused",
    "scalar",
    "transposed",
    "buffer",
    "tuple",
    "two_forwards",
)

# A number above 0 or infinity, which is "inf" in JSON.
NormType = float

HYBRIDS = ("hybrid_shard", "hybrid_shard_zero2")
STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", *HYBRIDS)


@dataclass(frozen=True)
class ModelSpec:
    kind: str = "transformer"
    layers: int = 4
    width: int = 256
    heads: int = 8
    context: int = 64
    vocabulary: int = 256
    sizes: tuple[int, ...] = (16, 32, 32, 8)
    depth: int = 3
    quirk_width: int = 8
    quirks: tuple[str, ...] = ()
    tied: bool = False
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
class PrecisionSpec:
    """Names of dtypes; empty where none was asked for."""

    parameter: str = ""
    reduce: str = ""
    output: str = ""
    buffer: str = ""
    exempt_norms: bool = False


@dataclass(frozen=True)
class DivideSpec:
    """What gradients are divided by before and after their sum; 0 and 0 are chosen by themselves."""

    pre: float = 0.0
    post: float = 0.0


@dataclass(frozen=True)
class ScheduleSpec:
    """When shards are gathered. On one device there is nothing to gather."""

    reshard_after_forward: int = -1
    forward_prefetch: int = 0
    backward_prefetch: str = "pre"
    limit_gathers: int = 0


@dataclass(frozen=True)
class CheckpointingSpec:
    """What is run again in backward. A single device keeps everything."""

    layers: str = "none"
    order: str = "inside"
    early_stop: bool = True


@dataclass(frozen=True)
class Scenario:
    model: ModelSpec = field(default_factory=ModelSpec)
    data: DataSpec = field(default_factory=DataSpec)
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    seed: int = 0
    world_size: int = 4
    strategy: str = "full_shard"
    replicas: int = 1
    wrap: str = "layer"
    dtype: str = "float32"
    precision: PrecisionSpec = field(default_factory=PrecisionSpec)
    divide: DivideSpec = field(default_factory=DivideSpec)
    loss_scale: float = 0.0
    max_norm: float = 1.0
    norm_type: NormType = 2.0
    micro_batches: int = 1
    accumulation: str = "each"
    schedule: ScheduleSpec = field(default_factory=ScheduleSpec)
    checkpointing: CheckpointingSpec = field(default_factory=CheckpointingSpec)
    construction: str = "plain"
    batch: int = 4
    steps: int = 20
    backend: str = "in_process"
    device: str = "cpu"

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of the parameters that are kept and optimised."""
        return DTYPES[self.dtype]

    @property
    def parameter_dtype(self) -> torch.dtype:
        """Of the parameters that the model computes with."""
        return DTYPES[self.precision.parameter or self.dtype]

    @property
    def reduce_dtype(self) -> torch.dtype:
        """Of gradients on their way from rank to rank."""
        return DTYPES[self.precision.reduce or self.precision.parameter or self.dtype]

    @property
    def output_dtype(self) -> torch.dtype | None:
        """Of what the model returns, if it is not what it computed in."""
        return DTYPES[self.precision.output] if self.precision.output else None

    @property
    def buffer_dtype(self) -> torch.dtype:
        return DTYPES[self.precision.buffer or self.dtype]

    @property
    def layout(self) -> tuple[int, int]:
        """Replicas and shards: rank i * shards + j has shard j of replica i."""
        if self.strategy == "no_shard":
            return self.world_size, 1
        return self.replicas, self.world_size // self.replicas

    @property
    def divisors(self) -> tuple[float, float]:
        """What gradients are divided by before their sum and after it."""
        if self.divide.post > 0:
            return self.divide.pre or 1.0, self.divide.post
        pre = 1
        if self.reduce_dtype == torch.float16:
            # A sum of many would overflow, a division of each by all would underflow: half and half.
            while self.world_size % pre == 0 and self.world_size / pre > pre:
                pre *= 2
        return float(pre), self.world_size / pre


# Fields that only some kinds of model, data or optimizer have. With another kind nobody reads them,
# so they must be left at their defaults.
_ONLY_FOR = {
    "model": {
        **dict.fromkeys(
            ("layers", "width", "heads", "context", "vocabulary", "tied"), ("transformer",)
        ),
        "sizes": ("mlp",),
        **dict.fromkeys(("depth", "quirk_width", "quirks"), ("quirks",)),
        "dropout": ("transformer", "mlp"),
    },
    "data": {"corpus": ("bytes",)},
    "optimizer": {"momentum": ("sgd",), **dict.fromkeys(("beta1", "beta2", "eps"), ("adamw",))},
}

_SECTIONS = {
    "model": ModelSpec,
    "data": DataSpec,
    "optimizer": OptimizerSpec,
    "precision": PrecisionSpec,
    "divide": DivideSpec,
    "schedule": ScheduleSpec,
    "checkpointing": CheckpointingSpec,
}


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
    quirks = tuple(sorted(scenario.model.quirks, key=QUIRKS.index))
    return dataclasses.replace(scenario, model=dataclasses.replace(scenario.model, quirks=quirks))


def scenario_to_json(scenario: Scenario) -> dict[str, Any]:
    document = {"schema": SCHEMA, **dataclasses.asdict(scenario)}
    if scenario.norm_type == math.inf:
        document["norm_type"] = "inf"
    return document


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
    elif kind == "NormType" and value == "inf":
        value = math.inf
    elif kind in ("float", "NormType"):
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise wanted("a number" if kind == "float" else 'a number, or "inf"')
        value = float(value)
        if not math.isfinite(value):
            raise wanted("a finite number")
    elif kind == "bool":
        if not isinstance(value, bool):
            raise wanted("true or false")
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


def _require(condition: bool, path: str, value: Any, wanted: str) -> None:
    if not condition:
        raise InputError(f"{path} is {_shown(value)}; wanted: {wanted}")


def _require_one_of(names: tuple[str, ...], path: str, value: str) -> None:
    _require(value in names, path, value, ", ".join(f'"{name}"' for name in names))


def _validate(scenario: Scenario) -> None:
    model, data, optimizer = scenario.model, scenario.data, scenario.optimizer
    _require_one_of(("mlp", "transformer", "quirks"), "model.kind", model.kind)
    _require_one_of(("bytes", "synthetic"), "data.kind", data.kind)
    _require_one_of(("adamw", "sgd"), "optimizer.kind", optimizer.kind)
    for section, values in (("model", model), ("data", data), ("optimizer", optimizer)):
        for name, kinds in _ONLY_FOR[section].items():
            if values.kind not in kinds:
                value = getattr(values, name)
                owners = " and ".join(f'"{kind}"' for kind in kinds)
                _require(
                    value == getattr(type(values)(), name),
                    f"{section}.{name}",
                    value,
                    f"nothing, because only {section}.kind {owners} has it",
                )
    _validate_model(model)
    if data.kind == "bytes":
        wanted = f'"synthetic" for model.kind "{model.kind}"'
        _require(model.kind == "transformer", "data.kind", data.kind, wanted)
        _require(len(data.corpus) >= 1, "data.corpus", data.corpus, "at least one file")
        _require(model.vocabulary >= 256, "model.vocabulary", model.vocabulary, "at least 256")

    for name in ("lr", "momentum", "eps", "weight_decay"):
        value = getattr(optimizer, name)
        _require(value >= 0, f"optimizer.{name}", value, "at least 0")
    for name in ("beta1", "beta2"):
        value = getattr(optimizer, name)
        _require(0 <= value < 1, f"optimizer.{name}", value, "0 <= beta < 1")

    _require(0 <= scenario.seed < 2**64, "seed", scenario.seed, "an unsigned 64-bit integer")
    _require(1 <= scenario.world_size <= 512, "world_size", scenario.world_size, "1 to 512")
    for name in ("micro_batches", "batch", "steps"):
        value = getattr(scenario, name)
        _require(value >= 1, name, value, "at least 1")
    _require(scenario.max_norm >= 0, "max_norm", scenario.max_norm, "at least 0 (0: no clipping)")
    in_range = 0.1 <= scenario.norm_type <= 64 or scenario.norm_type == math.inf
    _require(in_range, "norm_type", scenario.norm_type, 'a number from 0.1 to 64, or "inf"')
    _require_one_of(("layer", "model"), "wrap", scenario.wrap)
    _require_one_of(("plain", "meta", "sync"), "construction", scenario.construction)
    _validate_precision(scenario)
    _validate_strategy(scenario)
    _validate_schedule(scenario)
    _validate_checkpointing(scenario)


def _validate_model(model: ModelSpec) -> None:
    if model.kind == "mlp":
        _require(len(model.sizes) >= 2, "model.sizes", model.sizes, "at least two sizes")
        _require(min(model.sizes) >= 1, "model.sizes", model.sizes, "sizes of at least 1")
    elif model.kind == "transformer":
        for name in ("layers", "width", "heads", "context", "vocabulary"):
            least = 2 if name == "vocabulary" else 1
            value = getattr(model, name)
            _require(value >= least, f"model.{name}", value, f"at least {least}")
        wanted = f"a divisor of model.width, {model.width}"
        _require(model.width % model.heads == 0, "model.heads", model.heads, wanted)
    else:
        _require(model.depth >= 1, "model.depth", model.depth, "at least 1")
        _require(model.quirk_width >= 1, "model.quirk_width", model.quirk_width, "at least 1")
        quirks = set(model.quirks)
        wanted = f"each at most once of {', '.join(QUIRKS)}"
        fits = quirks <= set(QUIRKS) and len(quirks) == len(model.quirks)
        _require(fits, "model.quirks", model.quirks, wanted)
        # What has no effect is refused. The first layer's weight, tied, would be the frozen layer's.
        least = max(
            2 if quirks & {"tied_across", "twice", "frozen_layer"} else 1,
            3 if quirks >= {"tied_across", "frozen_layer"} else 1,
        )
        wanted = f"at least {least} for these model.quirks"
        _require(model.depth >= least, "model.depth", model.depth, wanted)
    _require(0 <= model.dropout < 1, "model.dropout", model.dropout, "0 <= dropout < 1")


def _validate_precision(scenario: Scenario) -> None:
    _require_one_of(tuple(DTYPES), "dtype", scenario.dtype)
    for name in ("parameter", "reduce", "output", "buffer"):
        _require_one_of(("", *DTYPES), f"precision.{name}", getattr(scenario.precision, name))
    if scenario.precision.exempt_norms:
        mixed = scenario.parameter_dtype != scenario.torch_dtype
        wanted = "false without norms of another dtype: they need a transformer in mixed precision"
        fits = scenario.model.kind == "transformer" and mixed
        _require(fits, "precision.exempt_norms", True, wanted)
    if "buffer" not in scenario.model.quirks:
        buffer = scenario.precision.buffer
        wanted = 'nothing, because only models with the quirk "buffer" have one'
        _require(buffer == "", "precision.buffer", buffer, wanted)
    divide = scenario.divide
    for name in ("pre", "post"):
        value = getattr(divide, name)
        _require(value >= 0, f"divide.{name}", value, "at least 0 (0: chosen automatically)")
    wanted = "above 0, because divide.pre is"
    _require(divide.pre == 0 or divide.post > 0, "divide.post", divide.post, wanted)
    scale = scenario.loss_scale
    _require(scale >= 0, "loss_scale", scale, "at least 0 (0: no scaling)")
    if scale > 0:
        inverse = torch.tensor(1 / scale, dtype=torch.float32).item()
        rounded = torch.tensor(scale, dtype=torch.float64).to(torch.float32).item()
        wanted = (
            "a number that float32 holds exactly, and whose reciprocal it holds as a normal one"
        )
        _require(rounded == scale and 2.0**-126 <= inverse < math.inf, "loss_scale", scale, wanted)


def _validate_strategy(scenario: Scenario) -> None:
    _require_one_of(STRATEGIES, "strategy", scenario.strategy)
    replicas, world = scenario.replicas, scenario.world_size
    if scenario.strategy in HYBRIDS:
        fits, wanted = replicas >= 1 and world % replicas == 0, f"a divisor of world_size, {world}"
    else:
        fits, wanted = replicas == 1, f'1 for strategy "{scenario.strategy}"'
    _require(fits, "replicas", replicas, wanted)

    accumulation = scenario.accumulation
    _require_one_of(("each", "last", "last_all_reduce"), "accumulation", accumulation)
    if scenario.micro_batches == 1:
        _require(accumulation == "each", "accumulation", accumulation, '"each" of one micro-batch')
    if accumulation == "last_all_reduce":
        wanted = f'another for strategy "{scenario.strategy}": only the hybrids sum in two stages'
        _require(scenario.strategy in HYBRIDS, "accumulation", accumulation, wanted)


def _validate_schedule(scenario: Scenario) -> None:
    schedule = scenario.schedule
    group, shards = schedule.reshard_after_forward, scenario.layout[1]
    _require(
        group in (-1, 0, 1) or (group > 1 and shards % group == 0),
        "schedule.reshard_after_forward",
        group,
        f"-1, 0, 1, or a divisor of the number of shards, {shards}",
    )
    _require(
        0 <= schedule.forward_prefetch <= 8,
        "schedule.forward_prefetch",
        schedule.forward_prefetch,
        "0 to 8",
    )
    _require_one_of(
        ("pre", "post", "none"), "schedule.backward_prefetch", schedule.backward_prefetch
    )
    _require(
        schedule.limit_gathers >= 0,
        "schedule.limit_gathers",
        schedule.limit_gathers,
        "at least 0 (0: no limit)",
    )


def _validate_checkpointing(scenario: Scenario) -> None:
    checkpointing = scenario.checkpointing
    layers, order = checkpointing.layers, checkpointing.order
    _require_one_of(("none", "all", "alternate", "segments"), "checkpointing.layers", layers)
    _require_one_of(("inside", "around"), "checkpointing.order", order)
    if scenario.model.kind != "transformer":
        wanted = f'another for model.kind "{scenario.model.kind}": only transformers have segments'
        _require(layers != "segments", "checkpointing.layers", layers, wanted)
    if layers not in ("all", "alternate"):
        wanted = f'"inside" for checkpointing.layers "{layers}"'
        _require(order == "inside", "checkpointing.order", order, wanted)
    if scenario.wrap != "layer":
        wanted = f'"inside" for wrap "{scenario.wrap}": no layer is a unit'
        _require(order == "inside", "checkpointing.order", order, wanted)
    if layers == "none":
        wanted = "true, because nothing runs again"
        _require(checkpointing.early_stop, "checkpointing.early_stop", False, wanted)


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
