"""User text for training: JSONL with prompts, answers or documents, or a plain text file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from builders.training.dialogue import Conversation, Template
from engines.errors import UsageError
from engines.files import FileError

__all__ = ["TrainingTextError", "read_user_text"]

_LONGEST_LINE = 1 << 22  # bytes
_LONGEST = 1024  # tokens of one conversation; what is behind is cut off


class TrainingTextError(UsageError):
    """The text to train on is empty or malformed."""

    rule = "train.text"
    remedy_text = (
        'Give a line of JSON each: {"prompt": ..., "answer": ...}, {"prompt": ...} or {"text": ...}.'
    )


def read_user_text(file: Path, template: Template) -> tuple[list[Conversation], list[Conversation]]:
    """(conversations that are complete, prompts that the target has to answer), each numbered from 0.

    `.jsonl`: a record a line. Any other name: plain text, a document a paragraph.

    Raises:
        TrainingTextError: with file and line: not JSON, unknown keys, empty; or nothing at all.
        FileError: cannot be read, or is not UTF-8.
    """
    if file.exists() and not file.is_file():
        raise TrainingTextError("no regular file", place=file)
    conversations: list[Conversation] = []
    prompts: list[Conversation] = []
    records = _json_lines(file) if file.suffix == ".jsonl" else _paragraphs(file)
    for place, record in records:
        keys = set(record)
        if keys == {"prompt"}:
            asked = template.unanswered(len(prompts), record["prompt"])
            if asked.start < _LONGEST:
                prompts.append(asked)
            continue
        if keys == {"text"}:
            prompt, start, ids = record["text"], 1, template.encode(record["text"])
        elif keys == {"prompt", "answer"}:
            opened = template.around(record["prompt"])
            closed = template.encode(record["answer"]) + list(template.closing)
            prompt, start, ids = record["prompt"], len(opened), opened + closed
        else:
            raise TrainingTextError(f"the keys {sorted(keys)}", place=place)
        if len(ids) - start < 2 or start + 2 > _LONGEST:
            continue  # nothing to predict
        conversations.append(Conversation(len(conversations), prompt, tuple(ids[:_LONGEST]), start, None))
    if not conversations and not prompts:
        raise TrainingTextError("no text to train on", place=file)
    return conversations, prompts


def _lines(file: Path) -> Iterator[tuple[str, str]]:
    """(file:line, line without its end)."""
    try:
        with file.open("rb") as source:
            number = 0
            while line := source.readline(_LONGEST_LINE + 1):
                number += 1
                place = f"{file}:{number}"
                if len(line) > _LONGEST_LINE:
                    raise TrainingTextError(
                        "a line too long", place=place, allowed=f"{_LONGEST_LINE:,} bytes"
                    )
                yield place, line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except OSError as error:
        raise FileError(f"cannot be read: {error.strerror}", place=file) from error
    except UnicodeDecodeError as error:
        raise FileError(f"not UTF-8: {error.reason}", place=f"{file}:{number}") from error


def _json_lines(file: Path) -> Iterator[tuple[str, dict[str, str]]]:
    for place, line in _lines(file):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TrainingTextError(f"not JSON: {error}", place=place) from error
        if not isinstance(record, dict):
            raise TrainingTextError("no JSON object", place=place)
        for key, value in record.items():
            if not isinstance(value, str) or not value.strip():
                raise TrainingTextError(f"{key!r} is no text, or empty", place=place)
            if not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
                raise TrainingTextError(f"half of a surrogate pair in {key!r}", place=place)
        yield place, record


def _paragraphs(file: Path) -> Iterator[tuple[str, dict[str, str]]]:
    begin, lines = "", list[str]()
    for place, line in [*_lines(file), ("", "")]:
        if line.strip():
            begin = begin or place
            lines.append(line)
        elif lines:
            yield begin, {"text": "\n".join(lines)}
            begin, lines = "", []
