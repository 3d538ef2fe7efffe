"""What config.json claims: typed access, and the claims that no tensor can prove (rope, windows)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builders.checkpoints.types import Rope
from engines.errors import CheckpointError

__all__ = ["Claims", "ConfigError", "UnsupportedRopeError", "rope", "sliding"]


class ConfigError(CheckpointError):
    """config.json lacks a key, holds a value of the wrong kind, or contradicts itself."""

    rule = "checkpoint.bad-config"
    remedy_text = "Fetch config.json again, from the revision that the weights belong to."


class UnsupportedRopeError(CheckpointError):
    """The rotary embedding is scaled in a way that is not supported."""

    rule = "checkpoint.unsupported-rope"
    remedy_text = "Use a checkpoint with default, linear, llama3 or yarn rope."


@dataclass(frozen=True)
class Claims:
    """A JSON object of a config file. A key whose value is null counts as absent."""

    values: Mapping[str, Any]
    place: Path | str

    def error(self, key: str, found: str, allowed: str) -> ConfigError:
        """An error about one key."""
        return ConfigError(found, place=f"{self.place}:{key}", allowed=allowed)

    def get(self, key: str, default: Any = None) -> Any:
        """The value, of whatever kind."""
        value = self.values.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer. Raises ConfigError."""
        value = self.get(key, default)
        if type(value) is not int or not 0 < value < 1 << 40:
            raise self.error(key, _shown(value), "a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number. Raises ConfigError."""
        value = self.get(key, default)
        if type(value) not in (int, float) or not 0 < value < 1e30:
            raise self.error(key, _shown(value), "a positive number")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """True or false. Raises ConfigError."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, _shown(value), "true or false")
        return value

    def contradicted(self, key: str, proved: object) -> tuple[str, ...]:
        """A warning where the key is there and says something else than what the tensors prove."""
        claimed = self.get(key)
        if claimed is None or claimed == proved:
            return ()
        name = Path(self.place).name
        return (f"{name} says {key} = {claimed!r}; the tensors prove {proved!r}"[:200],)

    def section(self, key: str) -> Claims | None:
        """A nested object, None where the key is absent. Raises ConfigError."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, _shown(value), "an object")
        return Claims(value, f"{self.place}:{key}")


def _shown(value: Any) -> str:
    return "nothing" if value is None else repr(value)[:100]


def rope(config: Claims) -> Rope:
    """The rotary embedding, from `rope_parameters` (transformers ≥ 5) or `rope_theta` and `rope_scaling`.

    Raises:
        UnsupportedRopeError: dynamic, longrope, partial, one a layer type, or unknown.
        ConfigError: a parameter is missing or no number.
    """
    new, old = config.section("rope_parameters"), config.section("rope_scaling")
    if new is not None and old is not None and new.values != old.values:
        raise config.error("rope_scaling", "differs from rope_parameters", "one of the two keys")
    scaling = new or old or Claims({}, config.place)
    if any(isinstance(value, dict) for value in scaling.values.values()):
        raise UnsupportedRopeError("one rope for each layer type", place=scaling.place)
    theta = scaling.number("rope_theta", config.number("rope_theta", 10000.0))
    partial = scaling.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise UnsupportedRopeError(f"partial_rotary_factor {partial}", place=scaling.place, allowed="1")

    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, "linear", factor=_factor(scaling))
    if kind == "llama3":
        low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
        if high <= low:
            raise scaling.error("high_freq_factor", str(high), f"more than low_freq_factor, {low}")
        return Rope(
            theta,
            "llama3",
            factor=_factor(scaling),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_position=_original(config, scaling),
        )
    if kind == "yarn":
        return _yarn(config, scaling, theta)
    raise UnsupportedRopeError(
        f"{kind!r}"[:100], place=f"{scaling.place}:rope_type", allowed="default, linear, llama3, yarn"
    )


def _factor(scaling: Claims, default: float | None = None) -> float:
    factor = scaling.number("factor", default)
    if factor < 1:
        raise scaling.error("factor", str(factor), "at least 1")
    return factor


def _original(config: Claims, scaling: Claims) -> int:
    """The context of pretraining; a key outside the section has precedence, as in transformers."""
    key = "original_max_position_embeddings"
    inner = scaling.integer(key, config.integer("max_position_embeddings"))
    return config.integer(key, inner)


def _yarn(config: Claims, scaling: Claims, theta: float) -> Rope:
    if not scaling.boolean("truncate", True):
        raise UnsupportedRopeError(
            "yarn without truncation", place=f"{scaling.place}:truncate", allowed="true"
        )
    original = _original(config, scaling)
    factor = _factor(scaling, config.integer("max_position_embeddings") / original)
    attention: float | None = None
    if scaling.get("attention_factor") is not None:
        attention = scaling.number("attention_factor")
    elif scaling.get("mscale") and scaling.get("mscale_all_dim"):
        # DeepSeek's variant: the ratio of two such factors.
        stretch = math.log(factor)
        attention = (0.1 * scaling.number("mscale") * stretch + 1) / (
            0.1 * scaling.number("mscale_all_dim") * stretch + 1
        )
    return Rope(
        theta,
        "yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        attention_factor=attention,
    )


def sliding(config: Claims, family: str, num_layers: int) -> tuple[int | None, tuple[int, ...]]:
    """The sliding window, tokens, and the layers that it applies to.

    Mistral: all layers where `sliding_window` is set. Qwen: only under `use_sliding_window`; the
    layers that `layer_types` marks, else those from `max_window_layers` on.

    Raises:
        ConfigError: layer types that are unknown or of the wrong number, or a window in a family
            that has none.
    """
    nothing: tuple[int | None, tuple[int, ...]] = (None, ())
    marked = _marked(config, num_layers)
    qwen = family.startswith("qwen")
    if family == "llama":
        if marked or config.get("sliding_window") is not None:
            raise config.error("sliding_window", "a sliding window in a Llama", "no window in this family")
        return nothing
    if qwen and not config.boolean("use_sliding_window", False):
        if marked:
            raise config.error("layer_types", "sliding layers without use_sliding_window", "one or the other")
        return nothing
    if config.get("sliding_window") is None:
        if marked:
            raise config.error("sliding_window", "nothing, and layer_types has sliding layers", "a window")
        return nothing
    window = config.integer("sliding_window")
    if not qwen:
        if marked is not None and len(marked) < num_layers:
            raise config.error("layer_types", "some layers slide, others do not", "all alike in a Mistral")
        return window, tuple(range(num_layers))
    if marked is None:
        first = config.get("max_window_layers", 28)
        if type(first) is not int or first < 0:
            raise config.error("max_window_layers", _shown(first), "a number of layers")
        marked = tuple(range(first, num_layers))
    return (window, marked) if marked else nothing


def _marked(config: Claims, num_layers: int) -> tuple[int, ...] | None:
    """The layers that `layer_types` marks as sliding; None where there is no such key."""
    types = config.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != num_layers:
        raise config.error("layer_types", _shown(types), f"a list of {num_layers}, one a layer")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise config.error("layer_types", _shown(kind), "full_attention or sliding_attention")
    return tuple(layer for layer, kind in enumerate(types) if kind == "sliding_attention")
