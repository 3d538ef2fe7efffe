"""Medusa heads: residual blocks, each head with an lm_head of its own (v1) or all with the target's (v2).

Source: Cai et al. 2024, section 2.1.1, and the checkpoints that were published with it. Their config
files are known to state wrong numbers of heads; the tensors are counted.
"""

from __future__ import annotations

from builders.checkpoints.architecture import ContradictionError, MissingTensorError, check_tensors
from builders.checkpoints.heads.kinds import MEDUSA
from builders.checkpoints.heads.source import OtherTargetError, Source, check_rows
from builders.checkpoints.heads.types import MedusaHeads
from builders.checkpoints.types import Checkpoint, TensorRef

__all__ = ["read_medusa"]


def read_medusa(source: Source, target: Checkpoint, fingerprint: str) -> MedusaHeads:
    """Proves Medusa heads by their tensors, and that they fit the target.

    Raises:
        MissingTensorError, ContradictionError, QuantizedError, UnknownTensorError: heads that are not
            all alike, or tensors of a wrong shape or dtype.
        OtherTargetError: another hidden size or vocabulary.
    """
    tensors: dict[str, TensorRef] = {}
    published: dict[str, str] = {}
    num_heads = num_layers = 0
    for name, tensor in source.tensors.items():
        found = MEDUSA.fullmatch(name)
        own = name
        if found is not None:
            head, layer = int(found[1]), int(found[2])
            num_heads = max(num_heads, head + 1)
            part = f"{layer}.linear" if found[3] else "lm_head"
            own = f"heads.{head}.{part}.{found[4]}"
            if found[3]:
                num_layers = max(num_layers, layer + 1)
        if own in tensors:
            raise ContradictionError(f"the same as {published[own]}", place=source.at(name))
        tensors[own], published[own] = tensor, name
    block = tensors.get("heads.0.0.linear.weight")
    if block is None:
        raise MissingTensorError("it is not there", place=source.at("0.0.linear.weight"))
    if len(block.shape) != 2 or block.shape[0] != block.shape[1]:
        raise ContradictionError(
            f"shape {list(block.shape)}", place=source.at(block.name), allowed="a square matrix"
        )
    hidden = block.shape[0]
    if hidden != target.config.hidden_size:
        raise OtherTargetError(
            f"heads for a hidden size of {hidden}",
            place=source.at(block.name),
            allowed=f"{target.config.hidden_size}, as in {target.path}",
        )

    lm_head = next((t for n, t in tensors.items() if n.endswith(".lm_head.weight")), None)
    rows = None if lm_head is None else (lm_head.shape or (0,))[0]
    if num_heads * num_layers > len(tensors):  # numbers out of names: bounded by what is there
        raise MissingTensorError(
            f"{len(tensors)} tensors whose names speak of {num_heads} heads of {num_layers} layers",
            place=source.path,
            allowed="two tensors a head and layer",
        )
    expected: dict[str, tuple[int, ...]] = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            expected[f"heads.{head}.{layer}.linear.weight"] = (hidden, hidden)
            expected[f"heads.{head}.{layer}.linear.bias"] = (hidden,)
        if rows is not None:
            expected[f"heads.{head}.lm_head.weight"] = (rows, hidden)

    def spell(name: str) -> str:
        plain = name.removeprefix("heads.").replace(".lm_head.", f".{num_layers}.")
        return published.get(name, plain)

    check_tensors(tensors, expected, str(source.path), spell)
    misplaced = next((n for n in published.values() if _lm_head_layer(n) not in (None, num_layers)), None)
    if misplaced is not None:
        raise ContradictionError(
            f"an lm_head as layer {_lm_head_layer(misplaced)}",
            place=source.at(misplaced),
            allowed=f"layer {num_layers}, behind the residual blocks",
        )
    config = source.config
    warnings = (
        *config.contradicted("medusa_num_heads", num_heads),
        *config.contradicted("medusa_num_layers", num_layers),
        *config.contradicted("hidden_size", hidden),
    )
    if lm_head is not None and rows is not None:
        warnings += check_rows(source, lm_head.name, rows, target)
        if config.get("version") == "2":
            warnings += ("config.json says version = '2', without an lm_head a head; the tensors have one",)
    return MedusaHeads(
        path=source.path,
        tensors=tensors,
        fingerprint=fingerprint,
        warnings=warnings,
        num_heads=num_heads,
        num_layers=num_layers,
        hidden_size=hidden,
        own_lm_head=lm_head is not None,
        vocab_size=rows,
    )


def _lm_head_layer(name: str) -> int | None:
    found = MEDUSA.fullmatch(name)
    return None if found is None or found[3] else int(found[2])
