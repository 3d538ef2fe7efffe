"""Proves that a drafter speaks its target's language: the same token behind every id.

A draft is exchanged as token ids. Where an id means another token to the drafter, nothing fails:
drafts are merely refused, and the speed is gone. So the proof is complete and comes before a build.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from builders.checkpoints.heads.types import EagleHead, MedusaHeads
from builders.checkpoints.types import Checkpoint, TokenizerFacts
from engines.errors import PairingError

__all__ = ["PairingProof", "VocabularyMismatchError", "pair", "pair_head"]

_SHOWN = 5  # differing tokens in a message


class VocabularyMismatchError(PairingError):
    """Target and drafter cannot exchange token ids, or not over the lengths asked for."""

    rule = "pairing.mismatch"
    remedy_text = "Choose a drafter of the target's own model family and release, with the same tokenizer."


@dataclass(frozen=True)
class PairingProof:
    """What was proved of a target and a drafter; `to_dict` goes into the manifest.

    Attributes:
        vocab_size: the common real vocabulary: highest id + 1. Ids above are padding in both.
        tokens: ids that were compared and found equal.
        target_width, drafter_width: logits of each model, padding included.
        special: special tokens of both, by role.
        max_position: tokens of context that both can hold.
        notes: differences that are allowed.
    """

    target: str  # fingerprints
    drafter: str
    vocab_size: int
    tokens: int
    target_width: int
    drafter_width: int
    special: Mapping[str, int]
    max_position: int
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "notes": list(self.notes)}


def pair(target: Checkpoint, drafter: Checkpoint, *, max_seq_len: int | None = None) -> PairingProof:
    """Compares two checkpoints' tokenizers, vocabulary widths and contexts.

    Args:
        max_seq_len: tokens that a sequence may grow to; None asks for nothing.

    Raises:
        VocabularyMismatchError: names everything that differs, at once.
    """
    place = f"{target.path} and {drafter.path}"
    facts: list[TokenizerFacts] = []
    problems: list[str] = []
    for role, checkpoint in (("target", target), ("drafter", drafter)):
        if checkpoint.tokenizer is None:
            problems.append(f"the {role} has no tokenizer.json")
        else:
            facts.append(checkpoint.tokenizer)
            problems += _width(role, checkpoint.tokenizer.size, checkpoint.config.vocab_size)
        if max_seq_len is not None and checkpoint.config.max_position < max_seq_len:
            problems.append(
                f"the {role} holds {checkpoint.config.max_position} tokens of context, "
                f"and max_seq_len is {max_seq_len}"
            )
    if len(facts) == 2:
        problems += _vocabulary(facts[0].vocab, facts[1].vocab)
        problems += _special(facts[0].special, facts[1].special)
    if problems:
        raise VocabularyMismatchError(
            "\n           ".join(problems),
            place=place,
            allowed="the same token behind every id, and a context that is long enough",
        )
    return PairingProof(
        target=target.fingerprint,
        drafter=drafter.fingerprint,
        vocab_size=facts[0].size,
        tokens=len(facts[0].vocab),
        target_width=target.config.vocab_size,
        drafter_width=drafter.config.vocab_size,
        special=dict(facts[0].special),
        max_position=min(target.config.max_position, drafter.config.max_position),
        notes=_notes(target, drafter, *facts),
    )


def pair_head(target: Checkpoint, head: EagleHead | MedusaHeads) -> dict[str, Any]:
    """What is known of heads and their target; `read_head` has proved that they fit. For the manifest."""
    shape: dict[str, Any] = {"draft_vocabulary": target.config.vocab_size, "taps": []}
    if isinstance(head, EagleHead):
        shape = {"draft_vocabulary": head.config.vocab_size, "taps": list(head.taps)}
    return {
        "target": target.fingerprint,
        "drafter": head.fingerprint,
        "format": head.format,
        **shape,
        "own_lm_head": head.own_lm_head,
        "notes": list(head.warnings),
    }


def _width(role: str, real: int, width: int) -> list[str]:
    if real <= width:
        return []
    return [f"the {role}'s tokenizer has ids up to {real - 1}, and its lm_head only {width} rows"]


def _vocabulary(target: Mapping[str, int], drafter: Mapping[str, int]) -> list[str]:
    """Compares id by id; the first differing ids and the share of equal ones."""
    if target == drafter:
        return []
    left = {number: token for token, number in target.items()}
    right = {number: token for token, number in drafter.items()}
    ids = sorted(left.keys() | right.keys())
    differing = [number for number in ids if left.get(number) != right.get(number)]
    overlap = 100 * (len(ids) - len(differing)) / len(ids)
    problems = [f"{len(differing)} of {len(ids)} ids differ ({overlap:.2f} % are equal):"]
    for number in differing[:_SHOWN]:
        problems.append(f"  id {number}: target {_token(left, number)}, drafter {_token(right, number)}")
    if len(differing) > _SHOWN:
        problems.append(f"  and {len(differing) - _SHOWN} more")
    return problems


def _token(tokens: Mapping[int, str], number: int) -> str:
    return repr(tokens[number])[:60] if number in tokens else "has none"


def _special(target: Mapping[str, int], drafter: Mapping[str, int]) -> list[str]:
    """BOS and UNK stand in prompts and must agree. EOS and PAD may differ: the target's EOS ends a text."""
    return [
        f"{role}: id {target[role]} in the target, {drafter[role]} in the drafter"
        for role in ("bos_token", "unk_token")
        if role in target and role in drafter and target[role] != drafter[role]
    ]


def _notes(
    target: Checkpoint, drafter: Checkpoint, left: TokenizerFacts, right: TokenizerFacts
) -> tuple[str, ...]:
    """Differences that change nothing in the exchange of ids."""
    pairs = (
        ("dtype", target.config.dtype, drafter.config.dtype),
        ("rope", target.config.rope, drafter.config.rope),
        ("context", target.config.max_position, drafter.config.max_position),
        ("vocabulary width", target.config.vocab_size, drafter.config.vocab_size),
        ("eos_token_ids", left.eos_token_ids, right.eos_token_ids),
        ("special tokens", dict(left.special), dict(right.special)),
        ("chat template", left.chat_template, right.chat_template),
    )
    notes = []
    for what, ours, theirs in pairs:
        if ours != theirs:
            values = "" if what == "chat template" else f": {ours} and {theirs}"
            notes.append(f"{what} differs{values}")
    return tuple(notes)
