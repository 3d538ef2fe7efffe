"""Which kind of head a checkpoint holds, by its tensors; what is known but not supported, by name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

from builders.checkpoints.heads.source import HeadError, Source

__all__ = [
    "MEDUSA",
    "SUPPORTED",
    "Kind",
    "SeveralLayersError",
    "UnknownHeadError",
    "UnsupportedHeadError",
    "check_one_layer",
    "claimed_other",
    "kind_of",
    "need_kind",
]

Kind = Literal["medusa", "eagle", "fusion_eagle", "eagle3"]

SUPPORTED = "Medusa, EAGLE-1/2, EAGLE-3 (also as SpecForge and speculators write it)"
MEDUSA = re.compile(r"(?:medusa_heads?\.)?(\d{1,4})\.(\d{1,4})\.(linear\.)?(weight|bias)")
_LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.")

# The first match counts: what is known by a tensor that only it has.
_UNSUPPORTED: tuple[tuple[str, str], ...] = (
    (r"^mask_hidden$", "P-EAGLE (parallel drafting)"),
    (r"(^|\.)(markov_head|confidence_head)\.", "DSpark"),
    (r"^(model\.)?hidden_norm\.weight$", "DFlash"),
    (r"(^|\.)(eh_proj|enorm|hnorm|shared_head)\.|(^|\.)mtp(_layers|_block|_head)?\.", "MTP layers"),
    (r"^(speculator\.)?(emb|proj|ln|head)\.\d+\.(weight|bias)$", "an MLP speculator"),
    (r"^(drafter\.)?(rnn_u|rnn_w|input_projs?)\.|^(drafter\.)?lm_heads?\.\d+\.", "ReDrafter"),
    (r"(^|\.)hydra_", "Hydra heads"),
    (r"(^|\.)lora_[AB](\.|$)", "a LoRA adapter"),
)
# What config files call them, in speculators_model_type, model_type or architectures.
_CLAIMED: tuple[tuple[str, str], ...] = (
    ("peagle", "P-EAGLE (parallel drafting)"),
    ("dspark", "DSpark"),
    ("dflash", "DFlash"),
    ("mtp", "MTP layers"),
    ("nextn", "MTP layers"),
    ("mlp_speculator", "an MLP speculator"),
    ("mlpspeculator", "an MLP speculator"),
    ("redrafter", "ReDrafter"),
    ("recurrent_drafter", "ReDrafter"),
    ("recurrentdrafting", "ReDrafter"),
    ("hydra", "Hydra heads"),
    ("clover", "Clover heads"),
)


class UnsupportedHeadError(HeadError):
    """A known kind of drafter that is not supported."""

    rule = "head.unsupported"
    remedy_text = "Use heads of a supported kind, train some (trtspec train-head), or use a draft model."


class UnknownHeadError(HeadError):
    """The tensors are those of no known kind of head."""

    rule = "head.unknown-format"
    remedy_text = "Check the path. A whole model is a drafter of method draft_model."


class SeveralLayersError(HeadError):
    """An EAGLE head with more than one decoder layer."""

    rule = "head.several-layers"
    remedy_text = "Use a head with one decoder layer, or run the drafter as a draft model."


def kind_of(source: Source) -> Kind | None:
    """The kind, None where the tensors are not those of a supported or known head (a whole decoder).

    Raises:
        UnsupportedHeadError: a known kind that is not supported.
    """
    names = source.tensors
    for pattern, what in _UNSUPPORTED:
        found = next((name for name in names if re.search(pattern, name)), None)
        if found is not None:
            raise _unsupported(source, what, f"by the tensor {found}"[:200])
    bare = {name.removeprefix("model.") for name in names}
    if any(MEDUSA.fullmatch(name) for name in names):
        return "medusa"
    if "fusion_fc.weight" in bare:
        return "fusion_eagle"
    if any(name.startswith("midlayer.") for name in bare) or "layers.0.hidden_norm.weight" in bare:
        return "eagle3"
    if bare & {"d2t", "t2d"}:
        return "eagle3"
    if "fc.weight" in bare:
        return "eagle"
    return None


def need_kind(source: Source) -> Kind:
    """As `kind_of`, where it must be a head.

    Raises:
        UnsupportedHeadError, UnknownHeadError.
    """
    kind = kind_of(source)
    if kind is not None:
        return kind
    what = claimed_other(source)
    if what is not None:
        raise _unsupported(source, what, "by config.json")
    inside = sorted({re.sub(r"\d+", "N", name) for name in source.tensors})
    whole = any(name.endswith("embed_tokens.weight") for name in source.tensors)
    raise UnknownHeadError(
        ("a whole model" if whole else "no head that is known") + f": {', '.join(inside[:4])}"[:300],
        place=source.path,
        allowed=SUPPORTED,
    )


def claimed_other(source: Source) -> str | None:
    """The unsupported kind that config.json claims, if any."""
    config = source.config
    claims: list[object] = [config.get("speculators_model_type"), config.get("model_type")]
    architectures = config.get("architectures")
    claims += architectures if isinstance(architectures, list) else []
    text = " ".join(claim.lower() for claim in claims if isinstance(claim, str))
    return next((what for word, what in _CLAIMED if word in text), None)


def check_one_layer(source: Source, names: Iterable[str]) -> None:
    """Raises SeveralLayersError where a decoder layer above 0 is there."""
    for name in names:
        layer = _LAYER.match(name)
        if layer is not None and int(layer[1]) > 0:
            raise SeveralLayersError(
                f"a decoder layer {int(layer[1])}", place=source.at(name), allowed="one decoder layer"
            )


def _unsupported(source: Source, what: str, evidence: str) -> UnsupportedHeadError:
    return UnsupportedHeadError(f"{what}, {evidence}", place=source.path, allowed=SUPPORTED)
