"""Reads a Hugging Face checkpoint folder: headers and configs only, in milliseconds."""

from __future__ import annotations

import hashlib
from pathlib import Path

from builders.checkpoints.architecture import (
    ArchitectureError,
    is_buffer,
    prove,
    recognise,
)
from builders.checkpoints.claims import Claims
from builders.checkpoints.files import MissingFileError, read_bytes, read_json
from builders.checkpoints.safetensors import read_folder, read_header_bytes
from builders.checkpoints.tokenizer import read_tokenizer
from builders.checkpoints.types import Checkpoint

__all__ = ["GgufInputError", "fingerprint", "read_checkpoint"]

EMBEDDING = "model.embed_tokens.weight"


class GgufInputError(ArchitectureError):
    """A GGUF file was given where a checkpoint folder is needed."""

    rule = "checkpoint.gguf-input"


def read_checkpoint(path: Path, *, borrow: Checkpoint | None = None) -> Checkpoint:
    """Reads and proves a checkpoint of the families Llama, Mistral, Qwen2 and Qwen3.

    The fingerprint is a SHA-256 over config.json, tokenizer.json and each weight file's name, size
    and header; it does not cover the weights' values, so that it costs no more than the reading.

    Args:
        path: the folder.
        borrow: a target, whose embedding (and with it its tokenizer) a draft model may share by leaving
            its own out.

    Raises:
        CheckpointError: a narrow class of it, for whatever is wrong: missing, cut short, malformed,
            contradictory, quantized or unsupported.
    """
    if path.is_file():
        if path.suffix == ".gguf":
            remedy = f"Convert it first: trtspec convert {path} -o DIR"
            raise GgufInputError("a GGUF file", place=path, allowed="a checkpoint folder", remedy=remedy)
        remedy = f"Give the folder: {path.parent}"
        raise MissingFileError("a file", place=path, allowed="a checkpoint folder", remedy=remedy)
    place = str(path)
    tensors = {name: tensor for name, tensor in read_folder(path).items() if not is_buffer(name)}
    shared = borrow if borrow is not None and EMBEDDING not in tensors else None
    if shared is not None:
        tensors[EMBEDDING] = shared.tensors[EMBEDDING]
    config_file = path / "config.json"
    values = read_json(config_file) if config_file.exists() else {}
    recognise(tensors, values, place)
    if not values:
        raise MissingFileError("no config.json, or an empty one", place=config_file)
    claims = Claims(values, config_file)
    config, warnings = prove(tensors, claims, place)
    tokenizer, more = read_tokenizer(path, claims) if shared is None else (shared.tokenizer, ())
    if tokenizer is not None:
        beyond = [i for i in tokenizer.eos_token_ids if i >= config.vocab_size]
        if beyond:
            raise claims.error("eos_token_id", str(beyond), f"ids below vocab_size {config.vocab_size}")
        if tokenizer.size > config.vocab_size:
            more += (
                f"the tokenizer has ids up to {tokenizer.size - 1}; "
                f"the tensors hold {config.vocab_size} rows: ids above cannot be used",
            )
    files = sorted({t.file for name, t in tensors.items() if shared is None or name != EMBEDDING})
    return Checkpoint(
        path=path,
        config=config,
        tensors=tensors,
        tokenizer=tokenizer,
        fingerprint=fingerprint(path, files),
        warnings=(*warnings, *more),
    )


def fingerprint(path: Path, weight_files: list[Path]) -> str:
    """A SHA-256 over a folder's config, tokenizer and the headers of its weight files."""
    digest = hashlib.sha256()
    for name in ("config.json", "tokenizer.json"):
        file = path / name
        content = read_bytes(file) if file.exists() else b""
        digest.update(f"{name} {len(content)} {hashlib.sha256(content).hexdigest()}\n".encode())
    for file in weight_files:
        header = hashlib.sha256(read_header_bytes(file)).hexdigest()
        digest.update(f"{file.name} {file.stat().st_size} {header}\n".encode())
    return digest.hexdigest()
