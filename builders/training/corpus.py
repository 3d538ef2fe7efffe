"""Conversations written by the target itself: the user's turn is sampled, the answer decoded.

A drafter learns best from what its target really says, so no foreign text is needed. A conversation
is one stream of tokens: the chat template's opening, a user turn sampled from the target, the
template's middle, and the answer. Slots of a batch are refilled as conversations end; each token,
given or drawn, is one row of one forward pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import AttentionInterface

from builders.training.dialogue import Conversation, Template, normal, states_of
from builders.training.states import as_bytes, mend, tapped_states
from engines.files import disk_errors

__all__ = ["GenerationPlan", "SlotCache", "write_conversations"]

_ATTENTION = "trtspec_slots"
_NUCLEUS = 256  # tokens considered when sampling


@dataclass(frozen=True)
class GenerationPlan:
    """What to generate. Equal plans give equal conversations on one machine.

    Lengths are in tokens; `warm_share` of the answers are sampled at `warm_temperature`, the others
    are greedy, as the engine's output is.
    """

    seed: int = 0
    batch: int = 128
    max_prompt: int = 72
    min_prompt: int = 5
    max_answer: int = 160
    top_p: float = 0.95
    warm_share: float = 0.15
    warm_temperature: float = 0.7


class SlotCache:
    """Keys and values of a batch whose rows have lengths of their own.

    Quacks like transformers' cache: a decoder layer calls `update` and attends to what it returns.
    """

    is_compileable = False

    def __init__(
        self, config: Any, batch: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        heads = config.num_key_value_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, batch, heads, capacity, dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.rows = torch.arange(batch, device=device)
        self.positions = torch.zeros(batch, dtype=torch.int64, device=device)

    def place(self, positions: torch.Tensor) -> torch.Tensor:
        """Set where the next token of each row goes; returns the mask [B, 1, 1, capacity]."""
        self.positions = positions
        columns = torch.arange(self.keys.shape[3], device=positions.device)
        return (columns[None] <= positions[:, None])[:, None, None]

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store one token's key and value a row; the whole cache (a slice would be copied)."""
        keys, values = self.keys[layer], self.values[layer]
        keys[self.rows, :, self.positions] = key[:, :, 0]
        values[self.rows, :, self.positions] = value[:, :, 0]
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Asked by transformers where no positions are given."""
        return int(self.positions.max())


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one token a row: heads that share keys are the rows of one product.

    Ten times as fast here as scaled_dot_product_attention, which copies keys for every head.
    """
    batch, heads, _one, dim = query.shape
    groups = key.shape[1]
    scores = torch.matmul(query.reshape(batch, groups, heads // groups, dim), key.transpose(2, 3))
    weights = scores.float().mul_(scaling).masked_fill_(~mask, -torch.inf).softmax(-1)
    out = torch.matmul(weights.to(value.dtype), value)
    return out.reshape(batch, 1, heads, dim), None


AttentionInterface.register(_ATTENTION, _attend)


@contextmanager
def _slot_attention(model: Any) -> Iterator[None]:
    """Let the model attend by `_attend`, and as before afterwards."""
    before = model.config._attn_implementation
    model.set_attn_implementation(_ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@dataclass
class _Slot:
    """One row of the batch."""

    index: int
    ids: list[int]  # known tokens, the pending one included
    user: int | None  # where the user's turn starts, while it is being sampled
    rng: np.random.Generator
    temperature: float  # of the answer
    fed: int = 0  # tokens that are in the cache
    start: int = 0  # where the answer starts
    prompt: str = ""


def write_conversations(
    model: Any,
    template: Template,
    out: Path,
    attempts: Sequence[int],
    plan: GenerationPlan,
    *,
    excluded: Collection[str] = (),
    given: Mapping[int, Conversation] | None = None,
    tokens: int | None = None,
    progress: Callable[[int, int, int], None] | None = None,
) -> None:
    """Make `attempts`, each a function of the plan and its number alone; append conversations and states.

    An attempt whose user turn is no prompt (too short, too long, garbage, excluded) leaves a line without
    tokens, so that it is not made again.

    Args:
        model: a causal language model of transformers, in the type that is fastest here.
        template: the chat template around a conversation.
        out: JSONL, a line an attempt, in the order in which they end; states go beside it.
        attempts: numbers of attempts that `out` lacks.
        plan: how to generate.
        excluded: user turns that must not occur (see `normal`).
        given: by attempt, what to go on from (its `opening`) instead of a sampled user turn.
        tokens: ids from here on are padding of the model's lm_head and never drawn; None: there is none.
        progress: called with (conversations, attempts left, answer tokens).

    Raises:
        DiskFullError: no space.
    """
    mend(out, 8 * model.config.hidden_size)
    made = written = 0
    real = model.config.vocab_size if tokens is None else tokens
    refused = frozenset(normal(p) for p in excluded)
    with (
        out.open("a", encoding="utf-8") as file,
        states_of(out).open("ab") as states_out,
        _slot_attention(model),
    ):
        for left, conversation, states in _run(model, template, plan, attempts, refused, given, real):
            with disk_errors(out):
                states_out.write(as_bytes(states))
                states_out.flush()
                file.write(conversation.to_json() + "\n")
                file.flush()
            if conversation.ids:
                made += 1
                written += len(conversation.ids) - conversation.start
            if progress is not None:
                progress(made, left, written)


def _run(
    model: Any,
    template: Template,
    plan: GenerationPlan,
    attempts: Sequence[int],
    refused: frozenset[str],
    given: Mapping[int, Conversation] | None,
    real: int,
) -> Iterator[tuple[int, Conversation, torch.Tensor]]:
    """Conversations as they end: attempts that have not begun, the conversation, its states [n, 4H]."""
    longest = max((len(given[i].opening) for i in attempts), default=0) if given is not None else 0
    capacity = max(longest, len(template.opening) + plan.max_prompt + len(template.middle)) + plan.max_answer
    cache = SlotCache(model.config, plan.batch, capacity, model.dtype, model.device)
    parameters = inspect.signature(model.model.forward).parameters
    cache_name = "cache" if "cache" in parameters else "past_key_values"
    waiting = iter(attempts)
    left = len(attempts)

    def fresh() -> _Slot | None:
        nonlocal left
        index = next(waiting, None)
        if index is None:
            return None
        left -= 1
        rng = np.random.Generator(np.random.Philox(key=[plan.seed, index]))
        temperature = plan.warm_temperature if rng.random() < plan.warm_share else 0.0
        if given is None:
            return _Slot(index, list(template.opening), len(template.opening), rng, temperature)
        ids = list(given[index].opening)
        return _Slot(index, ids, None, rng, temperature, start=len(ids), prompt=given[index].prompt)

    shape = plan.batch, capacity, 4 * model.config.hidden_size
    states = torch.zeros(shape, dtype=torch.bfloat16, device=model.device)

    def step(ids: torch.Tensor, fed: torch.Tensor) -> torch.Tensor:
        fed = fed.to(model.device)
        mask = cache.place(fed)
        arguments = {"position_ids": fed[:, None], "attention_mask": mask, cache_name: cache}
        hidden, taps = tapped_states(model, ids, **arguments)
        states[cache.rows, fed] = torch.cat([hidden, taps], dim=-1)[:, 0].bfloat16()
        return hidden

    # The opening is the same for all: read once, copied into each slot.
    shared = len(template.opening) - 1 if given is None else 0
    with torch.inference_mode():
        for position in range(shared):
            step(
                torch.full((plan.batch, 1), template.opening[position]),
                torch.full((plan.batch,), position),
            )
        opening = cache.keys[:, 0, :, :shared].clone(), cache.values[:, 0, :, :shared].clone()

    def place(row: int) -> _Slot | None:
        slot = fresh()
        if slot is not None:
            cache.keys[:, row, :, :shared], cache.values[:, row, :, :shared] = opening
            slot.fed = shared
        return slot

    slots = [place(row) for row in range(plan.batch)]
    while any(slots):
        fed = torch.tensor([s.fed if s else 0 for s in slots])
        ids = torch.tensor([[s.ids[s.fed] if s else 0] for s in slots])
        due = [i for i, s in enumerate(slots) if s and s.fed + 1 == len(s.ids)]
        with torch.inference_mode():
            hidden = step(ids, fed)
            top = model.lm_head(hidden[due, -1])[:, :real].float().topk(min(_NUCLEUS, real))
            logits, tokens = top.values.cpu().numpy(), top.indices.cpu().numpy()
        for busy in filter(None, slots):
            busy.fed += 1
        for row, i in enumerate(due):
            slot = slots[i]
            assert slot is not None
            warmth = 1.0 if slot.user is not None else slot.temperature
            token = _draw(logits[row], tokens[row], warmth, plan.top_p, slot.rng)
            state = _extend(slot, token, template, plan, refused)
            if state == "done":
                record = Conversation(slot.index, slot.prompt, tuple(slot.ids), slot.start, slot.temperature)
                # Its last token was never read: that row of states is stale, and nothing reads it.
                yield left, record, states[i, : len(slot.ids)]
            elif state == "dropped":
                yield left, Conversation(slot.index, "", (), 0, 0.0), states[i, :0]
            if state != "going":
                slots[i] = place(i)


def _extend(
    slot: _Slot, token: int, template: Template, plan: GenerationPlan, refused: frozenset[str]
) -> Literal["going", "done", "dropped"]:
    """Add a drawn token to a conversation."""
    if slot.user is None:
        slot.ids.append(token)
        over = token in template.stops or len(slot.ids) - slot.start >= plan.max_answer
        return "done" if over else "going"
    if token not in template.stops:
        slot.ids.append(token)
        return "going" if len(slot.ids) - slot.user <= plan.max_prompt else "dropped"
    text = template.decode(slot.ids[slot.user :])
    if len(slot.ids) - slot.user < plan.min_prompt or normal(text) in refused or not _plain(text):
        return "dropped"
    slot.prompt = text
    slot.ids += template.middle
    slot.start, slot.user = len(slot.ids), None
    return "going"


def _plain(text: str) -> bool:
    """Printable ASCII with at least three words."""
    return text == text.strip() and len(text.split()) >= 3 and all(c == "\n" or " " <= c <= "~" for c in text)


def _draw(logits: Any, ids: Any, temperature: float, top_p: float, rng: np.random.Generator) -> int:
    """A token from the nucleus of sorted logits; the first at temperature 0."""
    if temperature == 0:
        return int(ids[0])
    p = np.exp((logits - logits[0]) / temperature)
    p /= p.sum()
    inside = np.cumsum(p) - p < top_p
    p = np.where(inside, p, 0.0).cumsum()
    return int(ids[min(int(np.searchsorted(p, rng.random() * p[-1], side="right")), len(ids) - 1)])
