"""The bundle: a folder that holds everything an engine needs, and proof that nothing was touched.

manifest.json                       what this is, and SHA-256 and size of every file
step.onnx                           the fused step
weights/target/, weights/drafter/   safetensors files that step.onnx points into
tokenizer/                          tokenizer.json, tokenizer_config.json, chat_template.jinja
_COMPLETE                           written last: SHA-256 of manifest.json
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from engines.drafting.lookahead import LookaheadSizeError, lookahead_depth, lookahead_size
from engines.errors import BundleError
from engines.files import FileError, atomic_write, read_json, read_text, resolve_inside, sha256_file
from engines.trees import MAX_DEPTH, TreeError, from_choices
from engines.uniforms import DRAWS

__all__ = [
    "COMPLETE",
    "MANIFEST",
    "Bundle",
    "CacheShape",
    "CheckpointFacts",
    "DynamicTree",
    "EngineFacts",
    "FileFacts",
    "LookaheadSize",
    "Manifest",
    "Method",
    "StaticTree",
    "TypicalAcceptance",
    "is_older_bundle",
    "list_files",
    "open_bundle",
    "read_manifest",
    "seal_bundle",
]

SCHEMA_VERSION = 2
Method = Literal["none", "draft_model", "medusa", "eagle", "eagle3", "layer_skip", "ngram", "lookahead"]
MANIFEST = "manifest.json"
COMPLETE = "_COMPLETE"
MAX_MANIFEST = 16 << 20
MAX_NODES = 1024  # draft tokens a step


class IncompleteBundleError(BundleError):
    """There is no bundle, or its build did not end."""

    rule = "bundle.incomplete"
    remedy_text = "Is this the folder of a bundle? If its build was stopped, run trtspec build SPEC again."


class EditedBundleError(BundleError):
    """A file of the bundle is not what its manifest says."""

    rule = "bundle.edited"


class MissingFileError(BundleError):
    """A file that the manifest lists is not there."""

    rule = "bundle.missing-file"


class UnexpectedFileError(BundleError):
    """A file is there that the manifest does not list."""

    rule = "bundle.unexpected-file"
    remedy_text = "Delete it if it is yours; else build the bundle again."


class LinkError(BundleError):
    """Something in the bundle is a symbolic link: what it leads to can change behind the manifest."""

    rule = "bundle.link"
    remedy_text = "Put the file itself in its place, or build the bundle again."


class SchemaError(BundleError):
    """The manifest does not have the form that this version reads."""

    rule = "bundle.schema"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class FileFacts(_Record):
    """A file of the bundle."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    size: int = Field(ge=0)


class CacheShape(_Record):
    """A model's KV cache: two tensors [batch, kv_heads, positions, head_dim] a layer."""

    layers: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)


class CheckpointFacts(_Record):
    """Where weights came from."""

    path: str
    fingerprint: str
    family: str
    parameters: int
    dtype: str


class StaticTree(_Record):
    """A tree of draft tokens of fixed shape.

    Attributes:
        choices: its paths, see `engines.trees.from_choices`.
        drawn: where a request samples, a node's children are drawn without replacement from the
            drafter's distribution; else they are its most likely continuations.
    """

    choices: tuple[tuple[int, ...], ...]
    drawn: bool = False

    @property
    def most_siblings(self) -> int:
        """Children of one node at most, were all ranks used."""
        return 1 + max(rank for path in self.choices for rank in path)


class DynamicTree(_Record):
    """A tree that grows by the drafter's confidence (EAGLE-2).

    Attributes:
        top_k: nodes expanded a level, and children looked at of each.
        nodes: draft tokens that are kept for verification.
    """

    top_k: int = Field(ge=1, le=64)
    nodes: int = Field(ge=1, le=1024)


class LookaheadSize(_Record):
    """Sizes of lookahead decoding: window W, n-gram N and guesses G, see `engines.drafting.lookahead`."""

    window: int = Field(ge=1)
    ngram: int = Field(ge=2)
    guesses: int = Field(ge=1)


class TypicalAcceptance(_Record):
    """ε and α of typical acceptance, see `engines.verification.tree_reference.verify_typical`."""

    posterior_threshold: float = Field(gt=0, lt=1)
    posterior_alpha: float = Field(gt=0, le=1)


class EngineFacts(_Record):
    """What the runtime needs to know of the engine.

    Attributes:
        gamma: levels of draft tokens a step at most; in a chain, draft tokens.
        tree: `medusa`, `eagle`, `eagle3`: the shape of the drafts; None: a chain.
        confidence_threshold: drafting stops where the drafter's probability of its path falls below.
        feature_width: floats that the drafter reads of the target's hidden states per position.
        exit_layer: `layer_skip`: how many of the target's layers draft.
        min_match: `ngram`: tokens of a match at least.
        lookahead: `lookahead`: its sizes.
        typical: the parameters of `verification` typical, which is not lossless.
        lossless: the output is that of the target alone, up to the margin rule.
        vocab_size: real tokens; wider logits were cut.
        margin_tolerance: of the margin rule, in logits.
        step_cost: entry g: a step with g draft tokens (of a tree that the graph drafts: levels),
            drafting included, in plain steps; measured at build time, batch 1.
    """

    graph: str = "step.onnx"
    method: Method
    gamma: int = Field(ge=0)
    tree: StaticTree | DynamicTree | None = None
    confidence_threshold: float = Field(default=0.0, ge=0, le=1)
    feature_width: int = Field(default=0, ge=0)
    exit_layer: int | None = None
    min_match: int = 1
    lookahead: LookaheadSize | None = None
    verification: Literal["exact", "greedy", "typical"] = "exact"
    typical: TypicalAcceptance | None = None
    precision: Literal["fp32", "int8"] = "fp32"
    lossless: bool = True
    lossless_note: str = ""
    max_batch_size: int = Field(ge=1)
    max_seq_len: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    target_cache: CacheShape
    draft_cache: CacheShape | None = None
    eos_token_ids: tuple[int, ...]
    margin_tolerance: float = Field(ge=0)
    step_cost: tuple[Annotated[float, Field(gt=0)], ...] = ()

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> EngineFacts:
        """What one field says of another; the graph was emitted for these facts."""
        rules = (
            (self.verification == "typical", self.typical is not None, "verification typical, typical"),
            (self.method == "lookahead", self.lookahead is not None, "method lookahead, lookahead"),
            (self.method == "layer_skip", self.exit_layer is not None, "method layer_skip, exit_layer"),
            (self.method == "none", self.gamma == 0, "method none, gamma 0"),
        )
        for one, other, what in rules:
            if one != other:
                raise ValueError(f"one without the other: {what}")
        if self.lossless and (self.typical is not None or self.precision == "int8"):
            raise ValueError("typical acceptance and int8 are not lossless")
        if self.lookahead is not None:
            size = self.lookahead
            try:
                lookahead_size(size.window, size.ngram, size.guesses)
            except LookaheadSizeError as error:
                raise ValueError(str(error)) from error
            if self.gamma != lookahead_depth(size.window, size.ngram):
                raise ValueError(f"gamma {self.gamma} is not the depth of this lookahead's trees")
        if (self.tree is not None or self.typical is not None) and self.gamma > MAX_DEPTH:
            raise ValueError(f"gamma {self.gamma}: trees have {MAX_DEPTH} levels at most")
        if self.confidence_threshold and not self.has_confidence:
            raise ValueError("a confidence_threshold, and drafts that have no confidence")
        if self.tree is not None and self.method not in ("medusa", "eagle", "eagle3"):
            raise ValueError(f"method {self.method} drafts no tree")
        if isinstance(self.tree, StaticTree):
            try:
                shape = from_choices(self.tree.choices, max_depth=self.gamma, max_nodes=MAX_NODES)
            except TreeError as error:
                raise ValueError(str(error)) from error
            if self.tree.drawn and (self.method == "medusa" or self.typical is not None):
                raise ValueError("drawn siblings belong to EAGLE heads and exact verification")
            if self.tree.drawn and shape.skips_ranks:
                raise ValueError("a tree of drawn siblings that leaves one out")
            if shape.depth != self.gamma:
                raise ValueError(f"a tree of {shape.depth} levels, and gamma {self.gamma}")
        return self

    @property
    def drafts_in_graph(self) -> bool:
        """Does the step draft, not the host?"""
        return self.method not in ("none", "ngram", "lookahead")

    @property
    def has_confidence(self) -> bool:
        """Can a threshold stop drafting? In an EAGLE tree of fixed shape it cannot."""
        return self.drafts_in_graph and (self.method == "medusa" or not isinstance(self.tree, StaticTree))

    @property
    def draft_tokens(self) -> int:
        """Draft tokens a step at most; in a tree more than γ."""
        if self.lookahead is not None:
            return lookahead_size(self.lookahead.window, self.lookahead.ngram, self.lookahead.guesses)
        if isinstance(self.tree, StaticTree):
            return len(self.tree.choices)
        return self.gamma if self.tree is None else self.tree.nodes

    @property
    def draws(self) -> int:
        """Uniforms a position and sequence: three, or three for each sibling that is drawn."""
        lanes = self.tree.most_siblings if isinstance(self.tree, StaticTree) and self.tree.drawn else 1
        return DRAWS * lanes

    @property
    def cache_capacity(self) -> int:
        """Positions per sequence: `max_seq_len`, and a place for the last step's rejected rows."""
        return self.max_seq_len + self.draft_tokens


class Manifest(_Record):
    """`manifest.json`."""

    schema_version: Literal[2] = 2
    name: str
    created: str  # UTC, ISO 8601
    trtspec_version: str
    command: tuple[str, ...]
    tools: Mapping[str, str]
    target: CheckpointFacts
    drafter: CheckpointFacts | None = None
    pairing: Mapping[str, Any] | None = None
    engine: EngineFacts
    measurements: Mapping[str, Any] = Field(default_factory=dict)
    files: Mapping[str, FileFacts]


@dataclass(frozen=True)
class Bundle:
    """A bundle whose files were checked."""

    path: Path
    manifest: Manifest

    def file(self, relative: str) -> Path:
        """The path of a file that the manifest lists.

        Raises:
            MissingFileError: it lists no such file.
        """
        if relative not in self.manifest.files:
            raise MissingFileError(f"the manifest lists no {relative}", place=self.path / MANIFEST)
        return resolve_inside(self.path, relative)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(f.size for f in self.manifest.files.values())


def seal_bundle(folder: Path, manifest: Mapping[str, Any]) -> Manifest:
    """Write `manifest.json`, with every file of `folder`, and `_COMPLETE` behind it.

    Args:
        manifest: the fields of `Manifest` except `files`.
    """
    files = {}
    for file in sorted(folder.rglob("*")):
        relative = file.relative_to(folder).as_posix()
        if file.is_file() and relative not in (MANIFEST, COMPLETE):
            files[relative] = FileFacts(sha256=sha256_file(file), size=file.stat().st_size)
    complete = Manifest.model_validate({**manifest, "files": files})
    text = complete.model_dump_json(indent=2) + "\n"
    atomic_write(folder / MANIFEST, text)
    atomic_write(folder / COMPLETE, hashlib.sha256(text.encode()).hexdigest() + "\n")
    return complete


def open_bundle(path: Path) -> Bundle:
    """Read a bundle and check every file against its manifest.

    Raises:
        IncompleteBundleError: no folder, no manifest or no `_COMPLETE`.
        EditedBundleError: the manifest or a file was changed.
        MissingFileError, UnexpectedFileError: the folder's files are not the manifest's.
        LinkError: a file or folder in it is a symbolic link.
        SchemaError: another schema version, unknown or missing fields.
    """
    manifest = read_manifest(path)
    found = list_files(path) - {MANIFEST, COMPLETE}
    for relative in sorted(found):
        if (path / relative).is_symlink():
            raise LinkError(f"{relative} is a symbolic link", place=path)
    for relative in sorted(set(manifest.files) - found):
        raise MissingFileError(f"{relative} is missing", place=path)
    for relative in sorted(found - set(manifest.files)):
        raise UnexpectedFileError(f"{relative} is not in the manifest", place=path)
    for relative, facts in manifest.files.items():
        file = resolve_inside(path, relative)
        if not file.is_file():
            raise MissingFileError(f"{relative} is no file, or a link to none", place=path)
        size = file.stat().st_size
        if size != facts.size:
            raise EditedBundleError(f"{size:,} bytes", place=file, allowed=f"{facts.size:,} bytes")
        actual = sha256_file(file)
        if actual != facts.sha256:
            raise EditedBundleError(f"SHA-256 {actual}", place=file, allowed=facts.sha256)
    return Bundle(path, manifest)


def list_files(path: Path) -> set[str]:
    """Everything below a folder except the folders themselves; a link to a folder is listed, not entered."""
    return {f.relative_to(path).as_posix() for f in path.rglob("*") if f.is_symlink() or not f.is_dir()}


def read_manifest(path: Path) -> Manifest:
    """A finished bundle's manifest; the other files are not looked at.

    Raises:
        IncompleteBundleError, EditedBundleError, LinkError, SchemaError: see `open_bundle`.
    """
    return _parse(_sealed_manifest(path))


def is_older_bundle(path: Path) -> bool:
    """Is this a finished, untouched bundle that an earlier version wrote, and nothing else?"""
    try:
        raw = read_json(_sealed_manifest(path), max_bytes=MAX_MANIFEST)
    except (BundleError, FileError):
        return False
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    files = raw.get("files") if isinstance(raw, dict) else None
    older = isinstance(version, int) and 0 < version < SCHEMA_VERSION
    return older and isinstance(files, dict) and list_files(path) <= {*files, MANIFEST, COMPLETE}


def _sealed_manifest(path: Path) -> Path:
    """The manifest's file, if it is what was sealed."""
    manifest_file, complete_file = path / MANIFEST, path / COMPLETE
    for file in (manifest_file, complete_file):
        if not file.is_file():
            raise IncompleteBundleError(f"no {file.name}", place=path, allowed="a finished bundle's folder")
        if file.is_symlink():
            raise LinkError(f"{file.name} is a symbolic link", place=path)
    try:
        sealed = read_text(complete_file, max_bytes=100).strip()
    except FileError as error:
        raise EditedBundleError(error.found, place=complete_file, allowed="one SHA-256") from error
    if sealed != sha256_file(manifest_file):
        raise EditedBundleError("the manifest was changed after the build", place=manifest_file)
    return manifest_file


def _parse(file: Path) -> Manifest:
    raw = read_json(file, max_bytes=MAX_MANIFEST)
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if version != SCHEMA_VERSION:
        raise SchemaError(f"schema version {version}", place=file, allowed=str(SCHEMA_VERSION))
    try:
        # Through JSON once more: pydantic's strictness about tuples differs between the two inputs.
        return Manifest.model_validate_json(json.dumps(raw))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise SchemaError(f"{key}: {first['msg']}", place=file) from error
