"""EAGLE heads: one decoder layer that extrapolates the target's hidden states.

- EAGLE-1/2 (`fc` reads embedding and final hidden state; Li et al. 2024), also in the older speculators
  spelling (`fusion_fc`, `transformer`).
- EAGLE-3 (`fc` reads the residual stream at several depths, the layer reads twice the width; Li et al.
  2025), as its authors (`midlayer`), SpecForge and speculators (`layers.0`) publish it.

The tensors say which it is, and every size. config.json is asked for what no tensor shows: rope, epsilon,
tap positions, and whether norms serve the residual and the output.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from builders.checkpoints.architecture import (
    ContradictionError,
    MissingTensorError,
    UnknownTensorError,
    prove_layer,
)
from builders.checkpoints.heads.kinds import Kind, check_one_layer, claimed_other
from builders.checkpoints.heads.source import HeadError, OtherTargetError, Source, check_rows
from builders.checkpoints.heads.types import EagleFormat, EagleHead, FcNorm, HeadNorm
from builders.checkpoints.heads.vocabulary import read_map
from builders.checkpoints.types import Checkpoint, DecoderConfig, TensorRef

__all__ = ["NotShareableError", "TapsError", "read_eagle"]

_EMBED, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_LAYER = "model.layers.0."
_TRAINING_ONLY = ("verifier_lm_head.weight", "verifier_norm.weight")
_MAPS = ("d2t", "t2d")
_OPTIONAL_NORMS = ("embedding_layernorm", "pre_lm_head_layernorm", f"{_LAYER}input_layernorm", "model.norm")


class NotShareableError(HeadError):
    """A part that the head lacks cannot be the target's."""

    rule = "head.not-shareable"
    remedy_text = "Use a head that has this tensor; some exports leave it out by mistake."


class TapsError(OtherTargetError):
    """The depths at which the head reads the target do not fit the target."""

    rule = "head.taps"


@dataclass(frozen=True)
class _Names:
    """The way from published to canonical names and back."""

    tensors: dict[str, TensorRef]
    published: dict[str, str]
    layer: str  # the published prefix of the layer

    def spell(self, name: str) -> str:
        """As the checkpoint spells it, or would."""
        plain = name.replace(_LAYER, self.layer).removeprefix("model.")
        return self.published.get(name, plain)


def read_eagle(source: Source, kind: Kind, target: Checkpoint, fingerprint: str) -> EagleHead:
    """Proves an EAGLE head by its tensors, and that it fits the target.

    Raises:
        CheckpointError: ContradictionError, MissingTensorError, UnknownTensorError, QuantizedError,
            ConfigError, UnsupportedRopeError for the layer; SeveralLayersError; VocabularyMapError;
            NotShareableError: an embedding or lm_head that is missing and cannot be the target's.
        OtherTargetError, TapsError: another hidden size, vocabulary or number of layers.
    """
    check_one_layer(source, source.tensors)
    return _EagleProof(source, kind, target, fingerprint).result()


class _EagleProof:
    """One head's proof; keeps the warnings on the way."""

    def __init__(self, source: Source, kind: Kind, target: Checkpoint, fingerprint: str) -> None:
        self.source = source
        self.kind = kind
        self.target = target
        self.fingerprint = fingerprint
        self.names = _canonical(source)
        declared = any(key.startswith("speculators_") for key in source.config.values)
        spelled = kind == "fusion_eagle" or (kind == "eagle3" and self.names.layer == "layers.0.")
        self.speculators = declared or spelled
        self.config = (
            self.speculators and source.config.section("transformer_layer_config")
        ) or source.config
        self.warnings: list[str] = []

    def result(self) -> EagleHead:
        other = claimed_other(self.source)
        if other is not None:
            self.warnings.append(f"config.json says that it is {other}; the tensors prove an EAGLE head")
        head = self.eagle3() if self.kind == "eagle3" else self.eagle1()
        self.note_context(head)
        return replace(head, warnings=tuple(self.warnings))

    def eagle1(self) -> EagleHead:
        fc = self.matrix("fc.weight")
        hidden = fc.shape[0]
        if hidden != self.target.config.hidden_size:
            raise OtherTargetError(
                f"a head for a hidden size of {hidden}",
                place=self.source.at(fc.name),
                allowed=f"{self.target.config.hidden_size}, as in {self.target.path}",
            )
        for norm in _OPTIONAL_NORMS:
            if f"{norm}.weight" in self.names.tensors:
                raise UnknownTensorError(
                    "a norm that EAGLE-1 does not have (an option of HASS and of older speculators)",
                    place=self.at(f"{norm}.weight"),
                    allowed="a layer without input norm, and no final norm",
                )
        bias = "fc.bias" in self.names.tensors
        others: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, 2 * hidden)}
        if bias:
            others["fc.bias"] = (hidden,)
        rows = self.tables(others, hidden)
        proved = self.layer(hidden, hidden, ("post_attention_layernorm",), others)
        if rows is not None:
            self.warnings += check_rows(self.source, self.names.spell(_HEAD), rows, self.target)
        self.claim("fusion_bias" if self.kind == "fusion_eagle" else "bias", bias)
        return self.head(
            method="eagle",
            format="speculators" if self.speculators else "eagle",
            config=replace(proved, vocab_size=rows or self.target.config.vocab_size),
            target_hidden_size=hidden,
        )

    def eagle3(self) -> EagleHead:
        fc = self.matrix("fc.weight")
        hidden, width = fc.shape
        taps = self.taps(fc)
        others: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, width)}
        fc_norm = self.fc_norm()
        if fc_norm == "joint":
            others["input_norm.weight"] = (width,)
        elif fc_norm == "each":
            others |= {f"fc_norm.{k}.weight": (width // len(taps),) for k in range(len(taps))}
        head_norm = self.head_norm()
        if head_norm != "none" or _NORM in self.names.tensors:
            others[_NORM] = (hidden,)
        rows = self.tables(others, hidden)
        norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
        proved = self.layer(hidden, 2 * hidden, norms, others)
        ids, warnings = read_map(self.source, rows, self.target)
        self.warnings += warnings
        vocabulary = len(ids) if ids is not None else rows or self.target.config.vocab_size
        self.claim("draft_vocab_size", vocabulary)
        self.claim("target_hidden_size", self.target.config.hidden_size)
        self.claim("norm_before_fc", fc_norm == "joint")
        self.claim("fc_norm", fc_norm == "each")
        return self.head(
            method="eagle3",
            format=self.eagle3_format(),
            config=replace(proved, vocab_size=vocabulary),
            target_hidden_size=self.target.config.hidden_size,
            taps=taps,
            fc_norm=fc_norm,
            norm_before_residual=self.source.config.boolean("norm_before_residual", False),
            head_norm=head_norm,
            draft_to_target=ids,
        )

    def head(self, **facts: Any) -> EagleHead:
        """What both methods share; the defaults are EAGLE-1's."""
        plain: dict[str, Any] = {
            "path": self.source.path,
            "tensors": self.names.tensors,
            "fingerprint": self.fingerprint,
            "warnings": (),
            "taps": (),
            "fc_norm": "none",
            "norm_before_residual": False,
            "head_norm": "none",
            "draft_to_target": None,
        }
        return EagleHead(**{**plain, **facts})

    def layer(
        self, hidden: int, width: int, norms: tuple[str, ...], others: dict[str, tuple[int, ...]]
    ) -> DecoderConfig:
        proved, warnings = prove_layer(
            self.names.tensors,
            self.config,
            str(self.source.path),
            hidden=hidden,
            attention_width=width,
            norms=norms,
            others=others,
            spell=self.names.spell,
        )
        self.warnings += warnings
        return proved

    def tables(self, others: dict[str, tuple[int, ...]], hidden: int) -> int | None:
        """Embedding and lm_head: the head's own go to `others`, else the target's must do.

        Returns:
            The rows of its own lm_head; None where it has none.
        """
        rows: dict[str, int | None] = {_EMBED: None, _HEAD: None}
        for name in rows:
            if name in self.names.tensors:
                count = self.matrix(name).shape[0]
                others[name], rows[name] = (count, hidden), count
            elif hidden != self.target.config.hidden_size:
                raise NotShareableError(
                    f"it is not there, and the target's has {self.target.config.hidden_size} columns",
                    place=self.at(name),
                    allowed=f"[vocabulary, {hidden}], or a target of the head's own hidden size",
                )
            else:
                self.warnings.append(f"no {self.names.spell(name)}: the target's serves")
        embedded = rows[_EMBED]
        if embedded is not None:
            self.warnings += check_rows(self.source, self.names.spell(_EMBED), embedded, self.target)
        return rows[_HEAD]

    def taps(self, fc: TensorRef) -> tuple[int, ...]:
        """How many of the target's layers ran before each tap; fc's width proves the number of taps.

        The list of speculators names the layers that the taps enter; that of SpecForge, inside
        `eagle_config`, the layers that they leave.
        """
        layers, hidden = self.target.config.num_layers, self.target.config.hidden_size
        key, config, shift = "eagle_aux_hidden_state_layer_ids", self.source.config, 0
        inner = config.section("eagle_config")
        if config.get(key) is None and inner is not None:
            config, shift = inner, 1
        listed = config.get(key)
        if listed is None:
            taps: tuple[int, ...] = (2, layers // 2, layers - 3)
        elif isinstance(listed, list) and all(type(i) is int and abs(i) < 1 << 20 for i in listed):
            taps = tuple(i + shift for i in listed)
        else:
            raise config.error(key, repr(listed)[:100], "a list of layers")
        if fc.shape[1] != len(taps) * hidden or len(taps) < 2:
            raise OtherTargetError(
                f"it reads {fc.shape[1]} values of the target, for {len(taps)} taps"
                + ("" if listed is None else f", as {key} says"),
                place=self.source.at(fc.name),
                allowed=f"taps of {hidden}, the hidden size of {self.target.path}; two of them or more",
            )
        beyond = [tap for tap in taps if not 0 <= tap <= layers]
        if beyond:
            raise TapsError(
                f"a tap behind {beyond[0]} layers, and the target has {layers}",
                place=f"{config.place}:{key}",
                allowed=f"0 … {layers}",
            )
        return taps

    def fc_norm(self) -> FcNorm:
        joint = "input_norm.weight" in self.names.tensors
        each = any(name.startswith("fc_norm.") for name in self.names.tensors)
        if joint and each:
            raise ContradictionError(
                "input_norm beside fc_norm", place=self.source.at("input_norm.weight"), allowed="one of them"
            )
        return "joint" if joint else "each" if each else "none"

    def head_norm(self) -> HeadNorm:
        """`norm_output`: in speculators the normed state recurs; in SpecForge it is made at all."""
        if self.speculators:
            return "recurrent" if self.source.config.boolean("norm_output", False) else "logits"
        return "logits" if self.source.config.boolean("norm_output", True) else "none"

    def eagle3_format(self) -> EagleFormat:
        if self.speculators:
            return "speculators"
        switches = ("eagle_config", "fc_norm", "norm_output")
        return "specforge" if any(self.source.config.get(key) is not None for key in switches) else "eagle3"

    def note_context(self, head: EagleHead) -> None:
        made, needed = head.config.max_position, self.target.config.max_position
        if made < needed:
            self.warnings.append(
                f"the head was made for {made} positions, the target for {needed}: "
                "expect fewer accepted drafts beyond"
            )
        window = self.config.get("sliding_window")
        if window is not None and self.config.get("use_sliding_window") is not False:
            self.warnings.append(f"sliding_window = {window!r} is not used: EAGLE's layer sees all"[:200])

    def matrix(self, name: str) -> TensorRef:
        tensor = self.names.tensors.get(name)
        if tensor is None:
            raise MissingTensorError("it is not there", place=self.at(name))
        if len(tensor.shape) != 2 or 0 in tensor.shape:
            raise ContradictionError(f"shape {list(tensor.shape)}", place=self.at(name), allowed="a matrix")
        return tensor

    def claim(self, key: str, proved: object) -> None:
        self.warnings += self.source.config.contradicted(key, proved)

    def at(self, name: str) -> str:
        return self.source.at(self.names.spell(name))


def _canonical(source: Source) -> _Names:
    """The tensors by the names that graph emission uses; maps and what only training needs left out."""
    tensors: dict[str, TensorRef] = {}
    published: dict[str, str] = {}
    layer = "layers.0."
    for name, tensor in source.tensors.items():
        if name in _MAPS or name in _TRAINING_ONLY:
            continue
        bare = name.removeprefix("model.")
        for prefix in ("midlayer.", "transformer.", "layers.0."):
            if bare.startswith(prefix):
                layer, bare = prefix, _LAYER + bare.removeprefix(prefix)
                break
        bare = bare.replace("fusion_fc.", "fc.") if bare.startswith("fusion_fc.") else bare
        own = f"model.{bare}" if bare.startswith(("norm.", "embed_tokens.")) else bare
        if own in tensors:
            raise ContradictionError(f"the same as {published[own]}", place=source.at(name))
        tensors[own], published[own] = tensor, name
    return _Names(tensors, published, layer)
