"""Pairing compares every id, tells padding from tokens, and lists all differences at once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders.checkpoints.types import Checkpoint, DecoderConfig, Rope, TokenizerFacts
from builders.pairing import VocabularyMismatchError, pair

CONFIG = DecoderConfig(
    family="llama",
    vocab_size=12,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    rms_norm_eps=1e-6,
    rope=Rope(10000.0),
    max_position=100,
    tie_embeddings=False,
)
TOKENS = [f"t{i}" for i in range(10)]


def checkpoint(name: str, tokens: list[str] | None = None, special: Any = None, **changes: Any) -> Checkpoint:
    vocab = {token: number for number, token in enumerate(TOKENS if tokens is None else tokens) if token}
    tokenizer = TokenizerFacts(
        file=None,
        vocab=vocab,
        special={"bos_token": 0, "eos_token": 1} if special is None else special,
        eos_token_ids=(1,),
        chat_template=None,
        size=max(vocab.values()) + 1,
    )
    return Checkpoint(Path(name), replace(CONFIG, **changes), {}, tokenizer, fingerprint=name)


def problems(*checkpoints: Checkpoint, **options: Any) -> str:
    with pytest.raises(VocabularyMismatchError) as error:
        pair(*checkpoints, **options)
    assert error.value.rule == "pairing.mismatch"
    assert error.value.place == "target and drafter"
    return error.value.found


def test_a_pair_with_other_widths() -> None:
    proof = pair(checkpoint("target"), checkpoint("drafter", vocab_size=16), max_seq_len=100)
    assert (proof.vocab_size, proof.tokens, proof.target_width, proof.drafter_width) == (10, 10, 12, 16)
    assert proof.notes == ("vocabulary width differs: 12 and 16",)
    plain = proof.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert (plain["target"], plain["drafter"], plain["max_position"]) == ("target", "drafter", 100)


def test_first_differing_ids_and_overlap() -> None:
    drafter = [*TOKENS[:2], *reversed(TOKENS[2:])]
    found = problems(checkpoint("target"), checkpoint("drafter", drafter))
    assert found.splitlines()[0] == "8 of 10 ids differ (20.00 % are equal):"
    shown = [line.strip() for line in found.splitlines()[1:]]
    assert shown[0] == "id 2: target 't2', drafter 't9'"
    assert len(shown) == 6
    assert shown[-1] == "and 3 more"


def test_a_token_that_only_one_has() -> None:
    found = problems(checkpoint("target", [*TOKENS, "new"]), checkpoint("drafter"))
    assert "1 of 11 ids differ (90.91 % are equal)" in found
    assert "id 10: target 'new', drafter has none" in found


@given(changed=st.sets(st.integers(0, 9), min_size=1))
def test_any_changed_token_is_found(changed: set[int]) -> None:
    drafter = [f"other{i}" if i in changed else token for i, token in enumerate(TOKENS)]
    found = problems(checkpoint("target"), checkpoint("drafter", drafter))
    assert f"{len(changed)} of 10 ids differ ({100 - 10 * len(changed):.2f} %" in found
    for number in sorted(changed)[:5]:
        assert f"id {number}: target 't{number}', drafter 'other{number}'" in found


def test_special_tokens() -> None:
    other = checkpoint("drafter", special={"bos_token": 3, "eos_token": 2})
    found = problems(checkpoint("target"), other)
    assert found == "bos_token: id 0 in the target, 3 in the drafter"


def test_another_end_of_text_is_a_note() -> None:
    proof = pair(checkpoint("target"), checkpoint("drafter", special={"bos_token": 0, "eos_token": 2}))
    assert any("special tokens" in note for note in proof.notes)


def test_tokens_beyond_the_logits() -> None:
    found = problems(checkpoint("target", vocab_size=9), checkpoint("drafter", vocab_size=8))
    assert found.split("\n           ") == [
        "the target's tokenizer has ids up to 9, and its lm_head only 9 rows",
        "the drafter's tokenizer has ids up to 9, and its lm_head only 8 rows",
    ]


def test_context() -> None:
    drafter = checkpoint("drafter", max_position=50)
    assert "context differs: 100 and 50" in pair(checkpoint("target"), drafter).notes
    assert pair(checkpoint("target"), drafter, max_seq_len=50).max_position == 50
    assert problems(checkpoint("target"), drafter, max_seq_len=51) == (
        "the drafter holds 50 tokens of context, and max_seq_len is 51"
    )


def test_differences_that_are_notes() -> None:
    notes = pair(checkpoint("target"), checkpoint("drafter", dtype="BF16", rope=Rope(5.0))).notes
    assert notes[0] == "dtype differs: F32 and BF16"
    assert notes[1].startswith("rope differs")
    assert pair(checkpoint("target"), checkpoint("drafter")).notes == ()


def test_everything_at_once() -> None:
    bare = replace(checkpoint("drafter", max_position=5), tokenizer=None)
    found = problems(checkpoint("target", vocab_size=9), bare, max_seq_len=10)
    assert "lm_head only 9 rows" in found
    assert "the drafter has no tokenizer.json" in found
    assert "5 tokens of context" in found
