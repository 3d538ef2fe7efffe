"""The target's hidden states on conversations, kept on disk once for all methods.

For every token: the last hidden state after the final norm (Medusa, EAGLE-1, and the target's logits
for all), and the residual stream entering layers 2, L/2 and L-3 (EAGLE-3's taps), in bfloat16.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from builders.training.dialogue import Conversation, normal, read_conversations, states_of
from builders.training.states import pack

__all__ = ["Batch", "FeatureStore", "digest", "held_out"]


def digest(conversations: Sequence[Conversation]) -> str:
    """SHA-256 over all token ids and answer starts: the data's name."""
    sha = hashlib.sha256()
    for c in conversations:
        sha.update(np.array([c.start, len(c.ids), *c.ids], "<i4").tobytes())
    return sha.hexdigest()


def held_out(conversation: Conversation) -> bool:
    """True for one prompt in twenty, by the prompt's own hash: no prompt is on both sides."""
    return hashlib.sha256(normal(conversation.prompt).encode()).digest()[0] * 20 < 256


@dataclass(frozen=True)
class Batch:
    """Conversations padded to one length T.

    Row t of `hidden` [B, T, H] and `taps` [B, T, 3H] is the target's state after reading ids[t].
    `answer` [B, T] marks the rows t whose token is in the answer; `valid` those that are no padding.
    """

    ids: torch.Tensor
    hidden: torch.Tensor
    taps: torch.Tensor | None
    answer: torch.Tensor
    valid: torch.Tensor


class FeatureStore:
    """Conversations and their states, from pairs of files that generation or collection wrote.

    Args:
        files: JSONL files of conversations, each with its states beside it; those that exist are read.
        hidden_size: H.
    """

    def __init__(self, files: Sequence[Path], hidden_size: int) -> None:
        found: list[tuple[Conversation, Path, int]] = []
        for file in filter(Path.exists, files):
            offset = 0
            for conversation in read_conversations(file):
                found.append((conversation, states_of(file), offset))
                offset += len(conversation.ids)
        found.sort(key=lambda item: item[0].index)
        seen: set[str] = set()
        self.conversations: list[Conversation] = []
        self._places: list[tuple[Path, int]] = []
        for conversation, path, offset in found:
            prompt = normal(conversation.prompt)
            if conversation.ids and prompt not in seen:
                seen.add(prompt)
                self.conversations.append(conversation)
                self._places.append((path, offset))
        self.size = hidden_size

    def batch(self, indices: Sequence[int], *, taps: bool, device: torch.device) -> Batch:
        """The conversations `indices`, padded at the end."""
        chosen = [self.conversations[i] for i in indices]
        length = max(len(c.ids) for c in chosen)
        ids = torch.zeros(len(chosen), length, dtype=torch.int64)
        hidden = torch.zeros(len(chosen), length, self.size, dtype=torch.bfloat16)
        tapped = torch.zeros(len(chosen), length, 3 * self.size, dtype=torch.bfloat16) if taps else None
        answer = torch.zeros(len(chosen), length, dtype=torch.bool)
        valid = torch.zeros(len(chosen), length, dtype=torch.bool)
        for row, (i, c) in enumerate(zip(indices, chosen, strict=True)):
            n = len(c.ids)
            ids[row, :n] = torch.tensor(c.ids)
            states = self._states(i)
            hidden[row, :n] = states[:, : self.size]
            if tapped is not None:
                tapped[row, :n] = states[:, self.size :]
            answer[row, c.start : n] = True
            valid[row, :n] = True
        return Batch(
            ids.to(device),
            hidden.to(device),
            None if tapped is None else tapped.to(device),
            answer.to(device),
            valid.to(device),
        )

    def _states(self, index: int) -> torch.Tensor:
        """[n, 4H]"""
        path, offset = self._places[index]
        rows, width = len(self.conversations[index].ids), 4 * self.size
        data = np.fromfile(path, np.int16, rows * width, offset=offset * width * 2)
        return torch.from_numpy(data).view(torch.bfloat16).view(rows, width)

    def batches(self, indices: Sequence[int], tokens: int, rng: np.random.Generator) -> Iterator[list[int]]:
        """One pass over `indices` in batches of at most `tokens` tokens, like lengths together."""
        order = rng.permutation(len(indices))
        pool = max(len(order) // 8, 64)  # sorted by length within an eighth: little padding, still mixed
        groups: list[list[int]] = []
        for start in range(0, len(order), pool):
            block = [indices[j] for j in order[start : start + pool]]
            block.sort(key=lambda i: len(self.conversations[i].ids))
            groups += list(pack(block, lambda i: len(self.conversations[i].ids), tokens))
        for j in rng.permutation(len(groups)):
            yield groups[j]
