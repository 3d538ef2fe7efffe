"""A GGUF file's tokenizer as Hugging Face files: tokens, merges and template keep their bytes.

GGUF names the pre-tokenizer instead of describing it; the names' meanings are those of the models
that they come from (SmolLM, Llama 3, Qwen2, GPT-2). Only byte-level BPE is supported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.errors import CheckpointError

__all__ = ["GgufTokenizerError", "TokenizerFiles", "tokenizer_files"]

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # tokenizer.ggml.token_type
_ROLES = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
}
# Ends of a turn and of a message also end the generation.
_ENDS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BYTES: dict[str, Any] = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}


def _split_by(pattern: str) -> list[dict[str, Any]]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [split, {**_BYTES, "use_regex": False}]


@dataclass(frozen=True)
class _PreTokenizer:
    steps: list[dict[str, Any]]
    normalizer: dict[str, Any] | None = None
    ignore_merges: bool = False
    add_bos: bool = False  # where the file does not say


_PRE_TOKENIZERS = {
    "smollm": _PreTokenizer([{"type": "Digits", "individual_digits": True}, _BYTES]),
    "gpt-2": _PreTokenizer([_BYTES]),
    "default": _PreTokenizer([_BYTES]),
    "llama-bpe": _PreTokenizer(_split_by(_WORDS + r"\p{N}{1,3}" + _REST), ignore_merges=True, add_bos=True),
    "qwen2": _PreTokenizer(_split_by(_WORDS + r"\p{N}" + _REST), normalizer={"type": "NFC"}),
}


class GgufTokenizerError(CheckpointError):
    """The tokenizer of a GGUF file cannot be rebuilt exactly."""

    rule = "checkpoint.gguf-tokenizer"
    remedy_text = "Use the original Hugging Face checkpoint, which has its own tokenizer.json."


@dataclass(frozen=True)
class TokenizerFiles:
    """Contents of the files, plain data ready for JSON; templates by name (`default` first)."""

    tokenizer: dict[str, Any]  # tokenizer.json
    config: dict[str, Any]  # tokenizer_config.json
    generation: dict[str, Any]  # generation_config.json
    chat_templates: dict[str, str]
    size: int  # highest id + 1 that is in use


def tokenizer_files(metadata: Mapping[str, Any], place: Path, max_length: int) -> TokenizerFiles:
    """Rebuilds the tokenizer.

    Args:
        metadata: of the GGUF file.
        place: the file, for messages.
        max_length: the model's context, tokens.

    Raises:
        GgufTokenizerError: another kind of tokenizer than byte-level BPE, a pre-tokenizer that is not
            known here, or tables that contradict each other.
    """
    source = _Source(metadata, place)
    model = source.get("tokenizer.ggml.model", str)
    if model != "gpt2":
        raise source.error("tokenizer.ggml.model", f"a {model!r} tokenizer", "'gpt2' (byte-level BPE)")
    pre = source.get("tokenizer.ggml.pre", str)
    if pre not in _PRE_TOKENIZERS:
        raise source.error("tokenizer.ggml.pre", f"the pre-tokenizer {pre!r}", ", ".join(_PRE_TOKENIZERS))
    tokens: tuple[str, ...] = source.get("tokenizer.ggml.tokens", tuple)
    types: tuple[int, ...] = source.get("tokenizer.ggml.token_type", tuple)
    vocab = _vocab(source, tokens, types)
    roles = {role: token for role, key in _ROLES.items() if (token := source.token(key, tokens)) is not None}
    templates = _templates(source)

    recipe = _PRE_TOKENIZERS[pre]
    add_bos = source.get("tokenizer.ggml.add_bos_token", bool, recipe.add_bos)
    add_eos = source.get("tokenizer.ggml.add_eos_token", bool, False)
    around = [roles.get("bos_token") if add_bos else None, roles.get("eos_token") if add_eos else None]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(i, token, types[i]) for token, i in vocab.items() if types[i] != _NORMAL],
        "normalizer": recipe.normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": recipe.steps},
        "post_processor": _post_processor(around, vocab),
        "decoder": _BYTES,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": recipe.ignore_merges,
            "vocab": vocab,
            "merges": _merges(source, vocab),
        },
    }
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        **roles,
    }
    if "default" in templates:
        config["chat_template"] = templates["default"]
    ends = sorted({metadata[key] for key in _ENDS if source.token(key, tokens) is not None})
    generation: dict[str, Any] = {"_from_model_config": False}
    for key, name in (("bos_token_id", "bos_token"), ("pad_token_id", "pad_token")):
        if name in roles:
            generation[key] = vocab[roles[name]]
    if ends:
        generation["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return TokenizerFiles(tokenizer, config, generation, templates, max(vocab.values()) + 1)


class _Source:
    """The metadata, with errors that name the key."""

    def __init__(self, metadata: Mapping[str, Any], place: Path) -> None:
        self.metadata = metadata
        self.place = place

    def error(self, key: str, found: str, allowed: str) -> GgufTokenizerError:
        return GgufTokenizerError(found, place=f"{self.place}:{key}", allowed=allowed)

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        value = self.metadata.get(key, default)
        if not isinstance(value, kind):
            raise self.error(key, "nothing" if value is None else repr(value)[:60], kind.__name__)
        return value

    def token(self, key: str, tokens: tuple[str, ...]) -> str | None:
        """The token that a metadata key's id names; None where the key is absent."""
        if key not in self.metadata:
            return None
        number: int = self.get(key, int)
        if not 0 <= number < len(tokens):
            raise self.error(key, f"id {number}", f"an id below {len(tokens)}")
        return tokens[number]


def _vocab(source: _Source, tokens: Sequence[str], types: Sequence[int]) -> dict[str, int]:
    """Token → id, without the unused rows that pad the table."""
    if len(types) != len(tokens):
        raise source.error("tokenizer.ggml.token_type", f"{len(types)} types", f"{len(tokens)}, one a token")
    vocab: dict[str, int] = {}
    for number, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        place = f"tokenizer.ggml.tokens[{number}]"
        if kind == _UNUSED:
            continue
        if kind not in (_NORMAL, _CONTROL, _USER_DEFINED):
            raise source.error(
                place, f"{token!r} of type {kind}", "1 normal, 3 control, 4 user-defined, 5 unused"
            )
        if not isinstance(token, str):
            raise source.error(place, repr(token), "a string")
        if token in vocab:
            raise source.error(place, f"{token!r} is also token {vocab[token]}", "each token once")
        vocab[token] = number
    if not vocab:
        raise source.error("tokenizer.ggml.tokens", "no tokens", "at least one")
    return vocab


def _merges(source: _Source, vocab: Mapping[str, int]) -> list[list[str]]:
    pairs: list[list[str]] = []
    for number, merge in enumerate(source.get("tokenizer.ggml.merges", tuple)):
        pair = merge.split(" ") if isinstance(merge, str) else []
        if len(pair) != 2 or not (pair[0] in vocab and pair[1] in vocab and pair[0] + pair[1] in vocab):
            place = f"tokenizer.ggml.merges[{number}]"
            raise source.error(place, repr(merge), "two tokens whose concatenation is a token")
        pairs.append(pair)
    return pairs


def _added(number: int, token: str, kind: int) -> dict[str, Any]:
    return {
        "id": number,
        "content": token,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": kind == _CONTROL,
    }


def _post_processor(around: Sequence[str | None], vocab: Mapping[str, int]) -> dict[str, Any] | None:
    """Puts BOS before and EOS after each text, where the file asks for them."""
    before, after = ([token] if token is not None else [] for token in around)
    if not before and not after:
        return None

    def template(*texts: tuple[str, int]) -> list[dict[str, Any]]:
        pieces: list[dict[str, Any]] = []
        for letter, type_id in texts:
            pieces += [{"SpecialToken": {"id": token, "type_id": type_id}} for token in before]
            pieces.append({"Sequence": {"id": letter, "type_id": type_id}})
            pieces += [{"SpecialToken": {"id": token, "type_id": type_id}} for token in after]
        return pieces

    return {
        "type": "TemplateProcessing",
        "single": template(("A", 0)),
        "pair": template(("A", 0), ("B", 1)),
        "special_tokens": {
            token: {"id": token, "ids": [vocab[token]], "tokens": [token]} for token in (*before, *after)
        },
    }


def _templates(source: _Source) -> dict[str, str]:
    templates: dict[str, str] = {}
    if "tokenizer.chat_template" in source.metadata:
        templates["default"] = source.get("tokenizer.chat_template", str)
    for name in source.get("tokenizer.chat_templates", tuple, ()):
        # Each becomes a file of that name.
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
            raise source.error("tokenizer.chat_templates", repr(name), "letters, digits, - and _")
        templates[name] = source.get(f"tokenizer.chat_template.{name}", str)
    return templates
