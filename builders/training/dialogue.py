"""Conversations and the chat template around them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from engines.text import ChatTemplateError, TextCodec

__all__ = ["Conversation", "Template", "normal", "read_conversations", "states_of"]

_MARK = "PROMPT-STANDS-HERE"  # while the template is rendered


@dataclass(frozen=True)
class Conversation:
    """A prompt and its answer. `ids` holds all tokens, the template's included; the answer is
    `ids[start:]`. `temperature` is what the target generated it with; None: another wrote it."""

    index: int
    prompt: str
    ids: tuple[int, ...]
    start: int
    temperature: float | None

    @property
    def opening(self) -> tuple[int, ...]:
        """What the target is given to go on from: the prompt's turn, or half of a document."""
        return self.ids[: self.start if self.start > 1 else max(1, len(self.ids) // 2)]

    def to_json(self) -> str:
        """One line of JSONL."""
        record = {
            "index": self.index,
            "prompt": self.prompt,
            "start": self.start,
            "temperature": self.temperature,
            "ids": self.ids,
        }
        return json.dumps(record, separators=(",", ":"))


def normal(text: str) -> str:
    """Prompts that differ in case and blanks only count as one."""
    return " ".join(text.lower().split())


def read_conversations(file: Path, *, repair: bool = False) -> list[Conversation]:
    """What `to_json` wrote; with `repair`, a line that a kill cut off is cut from the file."""
    data = file.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if repair and len(whole) < len(data):
        with file.open("r+b") as out:
            out.truncate(len(whole))
    records = [json.loads(line) for line in whole.decode().splitlines()]
    return [
        Conversation(r["index"], r["prompt"], tuple(r["ids"]), r["start"], r["temperature"]) for r in records
    ]


def states_of(file: Path) -> Path:
    """The file of the target's hidden states beside a file of conversations."""
    return file.with_suffix(".states")


class Template:
    """A chat template, cut at the user's turn: `opening` + turn + `middle` + answer.

    Args:
        folder: holds the tokenizer and its template.
        stops: token ids that end a turn.
    """

    def __init__(self, folder: Path, stops: Sequence[int]) -> None:
        self._codec = TextCodec(folder)
        self.stops = frozenset(stops)

    @cached_property
    def _around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self._split({"role": "user", "content": _MARK})

    def _split(self, *messages: dict[str, str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Token ids before and behind the mark in a rendered conversation."""
        ids = self._codec.encode_chat(messages)
        parts = self._codec.tokenizer.decode(ids, skip_special_tokens=False).split(_MARK)
        if len(parts) != 2:
            raise ChatTemplateError(f"it shows a turn {len(parts) - 1} times", place="chat template")
        return tuple(self._codec.encode(parts[0])), tuple(self._codec.encode(parts[1]))

    def unanswered(self, index: int, prompt: str) -> Conversation:
        """A conversation with this user turn and no answer yet."""
        ids = self.around(prompt)
        return Conversation(index, prompt, tuple(ids), len(ids), None)

    @property
    def opening(self) -> tuple[int, ...]:
        """Token ids before the user's turn."""
        return self._around[0]

    @property
    def middle(self) -> tuple[int, ...]:
        """Token ids between the user's turn and the answer."""
        return self._around[1]

    @cached_property
    def closing(self) -> tuple[int, ...]:
        """The token that the template puts behind an answer, if there is one that ends a turn."""
        behind = self._split({"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK})[1]
        return tuple(t for t in behind if t in self.stops)[:1] or tuple(sorted(self.stops)[:1])

    def around(self, prompt: str) -> list[int]:
        """Token ids of the template with this user turn, the answer's turn opened."""
        return self._codec.encode_chat([{"role": "user", "content": prompt}])

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text."""
        return self._codec.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids."""
        return self._codec.decode(ids)
