"""The target's hidden states: what drafters read, taken from transformers' model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from builders.training.dialogue import Conversation, read_conversations, states_of
from engines.files import FileError, disk_errors, need_space

__all__ = ["as_bytes", "collect_states", "mend", "pack", "tap_layers", "tapped_states"]

_GROUP = 128  # conversations between two appends
_ROWS = 4096  # tokens of one forward pass, padding included


def tap_layers(num_layers: int) -> tuple[int, int, int]:
    """Layers whose input EAGLE-3 reads: low, middle, high."""
    return min(2, num_layers - 1), num_layers // 2, max(num_layers - 3, 0)


def as_bytes(tensor: torch.Tensor) -> bytes:
    """A bfloat16 tensor as stored."""
    return tensor.contiguous().view(torch.int16).cpu().numpy().tobytes()


def mend(file: Path, row: int) -> list[Conversation]:
    """Cut from a file of conversations, and from its states, what a kill left half-written.

    Args:
        file: JSONL; may be missing.
        row: bytes of one token's states.

    Raises:
        FileError: states are missing.
    """
    if not file.exists():
        states_of(file).unlink(missing_ok=True)
        return []
    found = read_conversations(file, repair=True)
    size = row * sum(len(c.ids) for c in found)
    if states_of(file).stat().st_size < size:  # states are written first: this is no kill's work
        raise FileError(
            "shorter than its conversations",
            place=states_of(file),
            remedy="Delete the folder: it is made again.",
        )
    os.truncate(states_of(file), size)
    return found


def tapped_states(model: Any, ids: torch.Tensor, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """One forward pass without logits: hidden [B, T, H] after the final norm, taps [B, T, 3H]."""
    layers = model.model.layers
    kept: dict[int, torch.Tensor] = {}
    wanted = tap_layers(len(layers))

    def keep(index: int) -> Callable[..., None]:
        def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            kept[index] = args[0] if args else kwargs["hidden_states"]

        return hook

    hooks = [layers[i].register_forward_pre_hook(keep(i), with_kwargs=True) for i in sorted(set(wanted))]
    try:
        hidden = model.model(input_ids=ids.to(model.device), **arguments).last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
    return hidden, torch.cat([kept[i] for i in wanted], dim=-1)


def collect_states(
    model: Any,
    conversations: Sequence[Conversation],
    out: Path,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write conversations that are given as they are, and their states; goes on where it stopped.

    Raises:
        DiskFullError: no space.
    """
    width = 8 * model.config.hidden_size
    done = len(mend(out, width))
    total = sum(len(c.ids) for c in conversations)
    read = sum(len(c.ids) for c in conversations[:done])
    need_space(out.parent, (total - read) * width)
    with out.open("a", encoding="utf-8") as file, states_of(out).open("ab") as states_out:
        for begin in range(done, len(conversations), _GROUP):
            group = conversations[begin : begin + _GROUP]
            with disk_errors(out):
                for states in _group_states(model, group):
                    states_out.write(as_bytes(states))
                states_out.flush()
                file.write("".join(c.to_json() + "\n" for c in group))
                file.flush()
            read += sum(len(c.ids) for c in group)
            if progress is not None:
                progress(read, total)


@torch.inference_mode()
def _group_states(model: Any, group: Sequence[Conversation]) -> list[torch.Tensor]:
    """States [n, 4H] of each conversation; those of like length share a pass."""
    found: dict[int, torch.Tensor] = {}
    order = sorted(range(len(group)), key=lambda i: len(group[i].ids))
    for rows in pack(order, lambda i: len(group[i].ids), _ROWS):
        length = max(len(group[i].ids) for i in rows)
        ids = torch.zeros(len(rows), length, dtype=torch.int64)
        for row, i in enumerate(rows):
            ids[row, : len(group[i].ids)] = torch.tensor(group[i].ids)
        # Padding stands at the end, where causal attention keeps it out of sight.
        states = torch.cat(tapped_states(model, ids, use_cache=False), dim=-1).bfloat16()
        for row, i in enumerate(rows):
            found[i] = states[row, : len(group[i].ids)]
    return [found[i] for i in range(len(group))]


def pack(items: Sequence[int], length: Callable[[int], int], tokens: int) -> Iterator[list[int]]:
    """Cut `items`, sorted by length, into groups of at most `tokens` padded tokens."""
    group: list[int] = []
    for i in items:
        if group and (len(group) + 1) * length(i) > tokens:
            yield group
            group = []
        group.append(i)
    if group:
        yield group
