"""Conversations and the chat template around them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.text import TextCodec

__all__ = ["Conversation", "Template", "normal", "read_conversations", "states_of"]

_MARK = "\u2063prompt\u2063"  # stands for the user's turn while the template is rendered


@dataclass(frozen=True)
class Conversation:
    """A prompt and its answer. `ids` holds all tokens, the template's included; the answer is
    `ids[start:]`. `temperature` is what the answer was generated with."""

    index: int
    prompt: str
    ids: tuple[int, ...]
    start: int
    temperature: float

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
        rendered = self._codec.tokenizer.decode(self._chat(_MARK), skip_special_tokens=False)
        opening, middle = rendered.split(_MARK)
        self.opening = tuple(self._codec.encode(opening))
        self.middle = tuple(self._codec.encode(middle))

    def _chat(self, prompt: str) -> list[int]:
        return self._codec.encode_chat([{"role": "user", "content": prompt}])

    def around(self, prompt: str) -> list[int]:
        """Token ids of the template with this user turn, the answer's turn opened."""
        return self._chat(prompt)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text."""
        return self._codec.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids."""
        return self._codec.decode(ids)
