"""Facts about a tokenizer from its files; nothing is run and no template is rendered."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from builders.checkpoints.claims import Claims
from builders.checkpoints.files import read_json, read_text
from builders.checkpoints.types import TokenizerFacts
from engines.errors import CheckpointError

__all__ = ["TokenizerError", "read_tokenizer"]

_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")


class TokenizerError(CheckpointError):
    """tokenizer.json or tokenizer_config.json contradicts itself."""

    rule = "checkpoint.bad-tokenizer"
    remedy_text = "Fetch the tokenizer's files again, from the same revision."


def read_tokenizer(path: Path, config: Claims) -> tuple[TokenizerFacts | None, tuple[str, ...]]:
    """The tokenizer of a checkpoint folder, and warnings about it.

    Args:
        path: the folder.
        config: of config.json, for its eos_token_id.

    Returns:
        (facts, warnings); no facts where there is no tokenizer.json.

    Raises:
        TokenizerError: a token with two ids, an id with two tokens, an id that is none.
        BadJsonError, LfsPointerError: as `read_json`.
    """
    file = path / "tokenizer.json"
    if not file.exists():
        other = [name for name in ("tokenizer.model", "vocab.json") if (path / name).exists()]
        return None, tuple(f"{name} without tokenizer.json: the tokenizer is not read" for name in other)
    vocab = _vocab(read_json(file), file)
    claims = _optional(path / "tokenizer_config.json")
    warnings: list[str] = []
    special: dict[str, int] = {}
    for role in _ROLES:
        token = claims.get(role)
        content = token.get("content") if isinstance(token, dict) else token
        if content is None:
            continue
        if not isinstance(content, str):
            raise TokenizerError(repr(content)[:100], place=f"{claims.place}:{role}", allowed="a token")
        if content in vocab:
            special[role] = vocab[content]
        else:
            warnings.append(f"tokenizer_config.json names {content!r} as {role}: no such token"[:200])
    facts = TokenizerFacts(
        file=file,
        vocab=vocab,
        special=special,
        eos_token_ids=_eos(_optional(path / "generation_config.json"), config, special),
        chat_template=_chat_template(path, claims),
        size=max(vocab.values()) + 1,
    )
    return facts, tuple(warnings)


def _optional(file: Path) -> Claims:
    return Claims(read_json(file) if file.exists() else {}, file)


def _vocab(content: Mapping[str, Any], file: Path) -> dict[str, int]:
    """Token → id: the model's vocabulary and the added tokens."""
    model = content.get("model")
    listed = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(listed, list):  # Unigram: [token, score] in the order of ids
        pairs = [
            (entry[0] if isinstance(entry, list) and entry else None, i) for i, entry in enumerate(listed)
        ]
    elif isinstance(listed, dict):
        pairs = list(listed.items())
    else:
        raise TokenizerError("no vocabulary", place=f"{file}:model.vocab", allowed="a map of tokens to ids")
    added = content.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(entry, dict) for entry in added):
        raise TokenizerError(repr(added)[:100], place=f"{file}:added_tokens", allowed="a list of tokens")
    pairs += [(entry.get("content"), entry.get("id")) for entry in added]

    vocab: dict[str, int] = {}
    tokens: dict[int, str] = {}
    for token, number in pairs:
        if not isinstance(token, str) or type(number) is not int or not 0 <= number < 1 << 31:
            raise TokenizerError(f"{token!r}: {number!r}"[:100], place=file, allowed="a token and its id")
        if vocab.setdefault(token, number) != number:
            raise TokenizerError(f"{token!r} has the ids {vocab[token]} and {number}"[:200], place=file)
        if tokens.setdefault(number, token) != token:
            raise TokenizerError(f"id {number} is {tokens[number]!r} and {token!r}"[:200], place=file)
    if not vocab:
        raise TokenizerError("no tokens", place=f"{file}:model.vocab", allowed="at least one")
    return vocab


def _eos(generation: Claims, config: Claims, special: Mapping[str, int]) -> tuple[int, ...]:
    """Ids that end a generation: of generation_config.json, else config.json, else the eos token's."""
    for claims in (generation, config):
        value = claims.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not ids or not all(type(i) is int and 0 <= i < 1 << 31 for i in ids):
            raise claims.error("eos_token_id", repr(value)[:100], "a token id, or a list of them")
        return tuple(dict.fromkeys(ids))
    return (special["eos_token"],) if "eos_token" in special else ()


def _chat_template(path: Path, claims: Claims) -> str | None:
    """chat_template.jinja, else tokenizer_config.json's; of several, the one named `default`."""
    file = path / "chat_template.jinja"
    if file.exists():
        return read_text(file)
    template = claims.get("chat_template")
    if isinstance(template, list):
        named = {e.get("name"): e.get("template") for e in template if isinstance(e, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise TokenizerError(
            repr(template)[:100], place=f"{claims.place}:chat_template", allowed="a template"
        )
    return template
