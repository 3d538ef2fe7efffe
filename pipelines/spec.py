"""The deployment spec: one YAML file, checked to the last key before anything is built."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from engines.bundle import Method
from engines.drafting.lookahead import LookaheadSizeError, lookahead_depth, lookahead_size
from engines.errors import UsageError
from engines.files import read_text
from engines.trees import NAMED_TREES, Tree, TreeError, from_choices

__all__ = ["DeploymentSpec", "DrafterSpec", "SpecError", "load_spec"]

MAX_SPEC = 64 << 10
MAX_GAMMA = 16
MAX_NODES = 256
MAX_NESTING = 16  # of lists and mappings in the file
OWNERS = {
    "checkpoint": ("draft_model", "medusa", "eagle", "eagle3"),
    "gamma": ("draft_model", "medusa", "eagle", "eagle3", "layer_skip", "ngram"),
    "tree": ("medusa", "eagle", "eagle3"),
    "siblings": ("eagle", "eagle3"),
    "confidence_threshold": ("draft_model", "medusa", "eagle", "eagle3", "layer_skip"),
    "exit_layer": ("layer_skip",),
    "min_match": ("ngram",),
    "lookahead": ("lookahead",),
}
LATER = {
    "quantization.scheme": ("fp8",),
    "compile.lane": ("trtllm", "llmapi"),
    "compile.compiler": ("tensorrt", "tensorrt_llm"),
}


class SpecError(UsageError):
    """The deployment spec is wrong."""

    rule = "spec.invalid"
    remedy_text = "Change the spec; examples/ holds specs that build."


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TargetSpec(_Section):
    """The model to serve. `checkpoint`: a Hugging Face folder or a GGUF file."""

    checkpoint: Path


class LookaheadSpec(_Section):
    """Sizes of lookahead decoding: window W, n-gram N, guesses G."""

    window: int = Field(default=4, ge=1, le=64, strict=True)
    ngram: int = Field(default=3, ge=2, le=16, strict=True)
    guesses: int = Field(default=4, ge=1, le=64, strict=True)

    @model_validator(mode="after")
    def _can_be_verified(self) -> LookaheadSpec:
        try:
            lookahead_size(self.window, self.ngram, self.guesses)
        except LookaheadSizeError as error:
            raise ValueError(f"{error.rule}: {error.found}; {error.allowed}") from error
        return self


class DynamicTreeSpec(_Section):
    """A tree that grows by the drafter's confidence: `top_k` nodes a level, the best `nodes` kept."""

    top_k: int = Field(ge=1, le=32, strict=True)
    nodes: int = Field(ge=1, le=256, strict=True)


TREE_TAGS = ("a list of paths", "a dynamic tree")  # pydantic puts them into the place of an error
TreeShape = Annotated[
    Annotated[tuple[tuple[int, ...], ...], Tag(TREE_TAGS[0])] | Annotated[DynamicTreeSpec, Tag(TREE_TAGS[1])],
    Discriminator(lambda value: TREE_TAGS[isinstance(value, dict | DynamicTreeSpec)]),
]


class DrafterSpec(_Section):
    """How draft tokens come about.

    Attributes:
        checkpoint: `draft_model`, `medusa`, `eagle`, `eagle3` only.
        gamma: levels of draft tokens a step at most; in a chain, draft tokens.
        tree: `medusa`, `eagle`, `eagle3` only. A named tree, a list of paths, or (not `medusa`) a
            dynamic tree of `gamma` levels. Without it the drafts are a chain.
        siblings: `eagle`, `eagle3` with a fixed tree: what a node's children are where a request samples:
            its `top_k` most likely continuations, or `drawn` from the drafter without replacement.
        confidence_threshold: drafting stops where the drafter's own probability of what it drafted so
            far falls below.
        exit_layer: `layer_skip` only: the target's first layers that draft.
        min_match: `ngram` only: tokens of a match at least.
        lookahead: `lookahead` only: its sizes.
    """

    method: Method = "none"
    checkpoint: Path | None = None
    gamma: int = Field(default=4, ge=1, le=MAX_GAMMA, strict=True)
    tree: TreeShape | None = None
    siblings: Literal["top_k", "drawn"] = "top_k"
    confidence_threshold: float = Field(default=0.0, ge=0, le=1)
    exit_layer: int | None = Field(default=None, ge=1, strict=True)
    min_match: int = Field(default=1, ge=1, le=16, strict=True)
    lookahead: LookaheadSpec = LookaheadSpec()

    @field_validator("tree", mode="before")
    @classmethod
    def _known_tree(cls, value: Any) -> Any:
        if isinstance(value, str):
            if value not in NAMED_TREES:
                known = ", ".join(NAMED_TREES)
                raise ValueError(f"no tree is named {value!r}; there are {known}, or give a list of paths")
            return NAMED_TREES[value]
        return value

    @model_validator(mode="after")
    def _only_its_own_keys(self) -> DrafterSpec:
        for key, owners in OWNERS.items():
            if key in self.model_fields_set and self.method not in owners:
                raise ValueError(f"{key} belongs to method {' or '.join(owners)}, not to {self.method}")
        if self.method in OWNERS["checkpoint"] and self.checkpoint is None:
            raise ValueError(f"method {self.method} needs a checkpoint")
        if self.method == "layer_skip" and self.exit_layer is None:
            raise ValueError("method layer_skip needs exit_layer")
        if self.siblings == "drawn" and not isinstance(self.tree, tuple):
            raise ValueError("siblings drawn needs a tree of fixed shape")
        if isinstance(self.tree, DynamicTreeSpec):
            if self.method == "medusa":
                raise ValueError("Medusa's heads do not see each other's tokens: its tree has a fixed shape")
        elif self.tree is not None:
            shape = self.static_tree
            if "gamma" in self.model_fields_set and self.gamma != shape.depth:
                raise ValueError(f"gamma {self.gamma} and a tree of {shape.depth} levels; remove gamma")
            if self.siblings == "drawn" and shape.skips_ranks:
                raise ValueError("siblings are drawn one after the other: the tree must not leave one out")
            if self.confidence_threshold and self.method != "medusa":
                raise ValueError("confidence_threshold stops chains and dynamic trees, not a fixed tree")
        return self

    @property
    def static_tree(self) -> Tree:
        """The fixed tree.

        Raises:
            ValueError: it is not a tree, or deeper than γ may be.
        """
        assert isinstance(self.tree, tuple)
        try:
            return from_choices(self.tree, max_depth=MAX_GAMMA, max_nodes=MAX_NODES)
        except TreeError as error:
            raise ValueError(f"{error.rule}: {error.found}") from error

    @property
    def draft_length(self) -> int:
        """γ: levels of draft tokens; 0 for plain decoding."""
        if self.method == "none":
            return 0
        if self.method == "lookahead":
            return lookahead_depth(self.lookahead.window, self.lookahead.ngram)
        return self.static_tree.depth if isinstance(self.tree, tuple) else self.gamma


class QuantizationSpec(_Section):
    """`int8`: weights only, for the CPU. Not lossless."""

    scheme: Literal["none", "int8"] = "none"


class LimitsSpec(_Section):
    """What one engine holds. `max_seq_len`: prompt and output together, in tokens."""

    max_batch_size: int = Field(default=8, ge=1, le=1024, strict=True)
    max_seq_len: int = Field(default=2048, ge=2, le=1 << 20, strict=True)


class CompileSpec(_Section):
    """A compiler to run."""

    lane: Literal["fused"] = "fused"
    compiler: Literal["onnxruntime"] = "onnxruntime"


class TypicalSpec(_Section):
    """Typical acceptance (Medusa): a draft token passes if its probability is above min(ε, α·exp(-H)).

    Not lossless: H is the entropy of the target's distribution, ε `posterior_threshold`, α
    `posterior_alpha`.
    """

    posterior_threshold: float = Field(default=0.09, gt=0, lt=1)
    posterior_alpha: float = Field(default=0.3, gt=0, le=1)


class DeploymentSpec(_Section):
    """A whole deployment. Paths are relative to the folder that trtspec is started in."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    target: TargetSpec
    drafter: DrafterSpec = DrafterSpec()
    verification: Literal["exact", "greedy", "typical"] = "exact"
    typical: TypicalSpec = TypicalSpec()
    quantization: QuantizationSpec = QuantizationSpec()
    limits: LimitsSpec = LimitsSpec()
    compile: tuple[CompileSpec, ...] = (CompileSpec(),)

    @field_validator("compile")
    @classmethod
    def _one_compiler(cls, value: tuple[CompileSpec, ...]) -> tuple[CompileSpec, ...]:
        if len(value) != 1:
            raise ValueError(f"{len(value)} entries; this version takes exactly one")
        return value

    @model_validator(mode="after")
    def _typical(self) -> DeploymentSpec:
        if "typical" in self.model_fields_set and self.verification != "typical":
            raise ValueError(f"typical belongs to verification typical, not to {self.verification}")
        if self.verification == "typical" and self.drafter.siblings == "drawn":
            raise ValueError("siblings drawn belongs to verification exact")
        if self.verification == "typical" and self.drafter.method == "none":
            raise ValueError("verification typical without draft tokens; choose a drafter.method")
        return self

    @model_validator(mode="after")
    def _quantized_drafts(self) -> DeploymentSpec:
        if self.quantization.scheme == "int8" and self.drafter.checkpoint is not None:
            raise ValueError(
                "quantization int8 covers the target only; use a drafter.method without checkpoint"
            )
        return self


def load_spec(path: Path) -> DeploymentSpec:
    """Read and check a deployment spec.

    Raises:
        SpecError: file, line, key, what was found and what is allowed.
        FileError: the file cannot be read, is larger than 64 KiB, or is not UTF-8.
    """
    text = read_text(path, max_bytes=MAX_SPEC)
    try:
        _refuse_bombs(text, path)
        node = yaml.compose(text, yaml.SafeLoader)
        lines: dict[str, int] = {}
        data = _plain(node, "", lines, path)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise SpecError(f"not YAML: {error.problem}", place=f"{path}:{line}") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise SpecError(f"not YAML: {error}", place=path) from error
    if not isinstance(data, dict):
        raise SpecError("no mapping at the top", place=path, allowed="keys: " + _names(DeploymentSpec))
    try:
        return DeploymentSpec.model_validate(data)
    except ValidationError as error:
        raise _first_error(error, lines, path) from error


def _refuse_bombs(text: str, path: Path) -> None:
    """Aliases multiply and deep nesting is quadratic to scan: stop reading at the first of either."""
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        place = f"{path}:{event.start_mark.line + 1}" if event.start_mark else str(path)
        if isinstance(event, yaml.AliasEvent):
            raise SpecError("an alias (*name)", place=place, allowed="values written out")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_NESTING:
            raise SpecError("lists in lists in lists …", place=place, allowed=f"{MAX_NESTING} levels")


def _plain(node: yaml.Node | None, key: str, lines: dict[str, int], path: Path) -> Any:
    """The data below a node; `lines` gets the line of every key path."""
    if node is None:
        return None
    lines.setdefault(key, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        found: dict[str, Any] = {}
        for name_node, value in node.value:
            name = str(name_node.value)
            inner = f"{key}.{name}" if key else name
            line = name_node.start_mark.line + 1
            if name in found:
                raise SpecError(f"the key {inner} stands twice", place=f"{path}:{line}")
            lines[inner] = line
            found[name] = _plain(value, inner, lines, path)
        return found
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, f"{key}.{i}", lines, path) for i, item in enumerate(node.value)]
    try:
        return yaml.SafeLoader("").construct_object(node, deep=True)
    except (AttributeError, LookupError, TypeError) as error:
        line = node.start_mark.line + 1
        raise SpecError(f"{node.value!r} is no {node.tag}", place=f"{path}:{line} {key}") from error


def _first_error(error: ValidationError, lines: Mapping[str, int], path: Path) -> SpecError:
    """One error, the first in the file: mending it may mend the others."""

    def line_of(location: tuple[int | str, ...]) -> int:
        parts = [str(p) for p in location]
        while parts and ".".join(parts) not in lines:
            parts.pop()
        return lines.get(".".join(parts), 1)

    first = min(error.errors(), key=lambda e: line_of(e["loc"]))
    location = tuple(part for part in first["loc"] if part not in TREE_TAGS)
    key = ".".join(str(p) for p in location)
    place = f"{path}:{line_of(location)}" + (f" {key}" if key else "")
    found = repr(first["input"]) if first["type"] != "missing" else "nothing"
    generic = ".".join(str(p) for p in location if not isinstance(p, int))
    if first["type"] == "extra_forbidden":
        section, name = _section(location[:-1]), str(location[-1])
        near = difflib.get_close_matches(name, section.model_fields, 1)
        remedy = f"Did you mean {near[0]}?" if near else "Remove the key."
        return SpecError(f"unknown key {name!r}", place=place, allowed=_names(section), remedy=remedy)
    if first["type"] == "missing":
        return SpecError(f"the key {key} is missing", place=place, remedy=f"Add {key}.")
    if first["input"] in LATER.get(generic, ()):
        return SpecError(f"{found} is not in this version", place=place, allowed=_allowed(first))
    if first["type"] == "value_error":
        return SpecError(str(first["ctx"]["error"]), place=place)
    return SpecError(found, place=place, allowed=_allowed(first))


def _allowed(error: Any) -> str:
    expected = error.get("ctx", {}).get("expected")
    return str(expected) if expected else str(error["msg"]).removeprefix("Input should be ")


def _section(location: tuple[int | str, ...]) -> type[BaseModel]:
    section: type[BaseModel] = DeploymentSpec
    for part in location:
        if isinstance(part, int):
            continue
        section = next(m for m in _models(section.model_fields[part].annotation))
    return section


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in getattr(annotation, "__args__", ()):
        yield from _models(inner)


def _names(section: type[BaseModel]) -> str:
    return ", ".join(section.model_fields)
