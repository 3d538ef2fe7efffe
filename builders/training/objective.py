"""What is minimised, and what it is for: loss, and honest simulation of greedy drafting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from builders.training.drafters import Drafter, shift
from builders.training.features import Batch, FeatureStore

__all__ = ["Acceptance", "chains", "cross_entropy", "loss", "simulate"]

_CHUNK = 128  # rows of logits at a time
_DECAY = 0.8  # weight of step k is 0.8^k (Medusa, section 2.2.1; EAGLE-3's training code)


def loss(drafter: Drafter, batch: Batch, steps: int) -> torch.Tensor:
    """Cross-entropy against the target's distribution over `drafter.vocabulary`, on answer tokens.

    Rows whose true token is outside that vocabulary do not count. Steps are weighted by 0.8^k.
    """
    inside = torch.zeros(drafter.target.lm_head.shape[0], dtype=torch.bool, device=batch.ids.device)
    inside[drafter.vocabulary] = True
    counted = shift(batch.answer & inside[batch.ids], 1)  # row j: token j + 1 is to be predicted
    teacher = _probabilities(batch.hidden[counted], drafter.rows)
    rank = torch.zeros_like(batch.ids)
    rank[counted] = torch.arange(teacher.shape[0], device=batch.ids.device)
    total = torch.zeros((), device=batch.ids.device)
    weights = 0.0
    for k, features in enumerate(drafter.features(batch, steps)):
        rows = shift(counted, 1 + k)
        cross = cross_entropy(features[rows], drafter.rows, teacher, shift(rank, 1 + k)[rows])
        if drafter.feature_loss:
            true = shift(batch.hidden, 1 + k)[rows].float()
            cross = cross + drafter.feature_loss * functional.smooth_l1_loss(features[rows].float(), true)
        total = total + _DECAY**k * cross
        weights += _DECAY**k
    return total / weights


@torch.no_grad()
def _probabilities(hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """softmax of hidden [n, H] times rows [V, H], in the type of `rows`."""
    out = torch.empty(hidden.shape[0], rows.shape[0], dtype=rows.dtype, device=rows.device)
    for part in _chunks(hidden.shape[0]):
        out[part] = functional.linear(hidden[part].to(rows.dtype), rows).float().softmax(-1).to(rows.dtype)
    return out


def cross_entropy(
    features: torch.Tensor, rows: torch.Tensor, teacher: torch.Tensor, index: torch.Tensor
) -> torch.Tensor:
    """Mean cross-entropy of softmax(features rows^T) against the distributions teacher[index].

    Args:
        features: [n, H], the only argument that gets a gradient.
        rows: [V, H] of the lm_head, frozen.
        teacher: [m, V].
        index: [n] into `teacher`.
    """
    out: torch.Tensor = _CrossEntropy.apply(features, rows, teacher, index)  # type: ignore[no-untyped-call]
    return out


class _CrossEntropy(torch.autograd.Function):
    """Loss and gradient of a few rows at a time, so that logits stay in the cache.

    On a CPU, softmax over whole batches costs more than all matrix products together: its temporaries are
    hundreds of megabytes. The lm_head is frozen, so the gradient is known as soon as the logits are.
    """

    @staticmethod
    def forward(
        ctx: Any, features: torch.Tensor, rows: torch.Tensor, teacher: torch.Tensor, index: torch.Tensor
    ) -> torch.Tensor:
        """See `cross_entropy`."""
        count = max(features.shape[0], 1)
        gradient = torch.empty(features.shape, dtype=torch.float32, device=features.device)
        total = torch.zeros((), device=features.device)
        for part in _chunks(features.shape[0]):
            logits = functional.linear(features[part].to(rows.dtype), rows).float()
            wanted = teacher[index[part]].float()
            logits -= logits.amax(-1, keepdim=True)
            total -= torch.dot(wanted.flatten(), logits.flatten())
            mass = logits.exp_().sum(-1, keepdim=True)
            total += mass.log().sum()
            logits /= mass
            logits -= wanted
            gradient[part] = (logits.to(rows.dtype) @ rows).float()
        ctx.save_for_backward(gradient.mul_(1 / count))
        ctx.dtype = features.dtype
        return total / count

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """The gradient that `forward` found, times the upstream one."""
        (gradient,) = ctx.saved_tensors
        return (gradient * upstream).to(ctx.dtype), None, None, None


def _chunks(count: int) -> list[slice]:
    return [slice(begin, begin + _CHUNK) for begin in range(0, count, _CHUNK)]


@dataclass(frozen=True)
class Acceptance:
    """Greedy drafting, simulated. `per_position[i]` is P(draft i + 1 accepted), unconditional."""

    gamma: int
    steps: int
    accepted: int
    per_position: tuple[float, ...]
    top1: float  # of the first draft, over all rows

    @property
    def mean_length(self) -> float:
        """(accepted + steps) / steps, the bonus token included."""
        return 1 + self.accepted / max(self.steps, 1)


@torch.no_grad()
def simulate(
    drafter: Drafter, store: FeatureStore, indices: Sequence[int], gamma: int, device: torch.device
) -> Acceptance:
    """Draft a chain of `gamma` tokens wherever a verify step would begin, as the engine does.

    Chains read their own drafts and their own states. The conversations' answers must be greedy: they
    stand for what the target would say. A chain is right as long as it says the same.
    """
    accepted_at = torch.zeros(gamma + 1, dtype=torch.int64)
    first_right = first_all = 0
    for start in range(0, len(indices), 8):
        group = indices[start : start + 8]
        batch = store.batch(group, taps=drafter.needs_taps, device=device)
        _, right = chains(drafter, batch, gamma)
        rows = shift(batch.answer, 1) & shift(batch.valid, 2)
        first_right += int((right[0] & rows).sum())
        first_all += int(rows.sum())
        lengths = torch.stack(right).long().cumprod(0).sum(0).tolist()
        for row, i in enumerate(group):
            conversation = store.conversations[i]
            t, last = conversation.start - 1, len(conversation.ids) - 1
            while t + 2 <= last:  # token t + 1 is known, t + 2 is the first to be drafted
                accepted = lengths[row][t]
                accepted_at[accepted] += 1
                t += accepted + 1
    steps = int(accepted_at.sum())
    at_least = accepted_at.flip(0).cumsum(0).flip(0)
    return Acceptance(
        gamma,
        steps,
        int((accepted_at * torch.arange(gamma + 1)).sum()),
        tuple(float(at_least[i + 1]) / max(steps, 1) for i in range(gamma)),
        first_right / max(first_all, 1),
    )


def chains(drafter: Drafter, batch: Batch, gamma: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """For each step: the draft of the chain that starts at row t, and whether it is the target's token.

    Both [B, T]; meant for rows from the one before the answer on. Elsewhere the text's tokens stand in.
    """
    ids = drafter.draft_ids
    rows = drafter.rows if ids is not None else drafter.target.lm_head
    begins = shift(batch.answer, 1)
    drafts: list[torch.Tensor] = []
    right: list[torch.Tensor] = []

    def guess(k: int, features: torch.Tensor) -> torch.Tensor:
        truth = shift(batch.ids, 2 + k)
        read = begins & shift(batch.valid, 2 + k)
        best = functional.linear(features[read].to(rows.dtype), rows).argmax(-1)
        draft = truth.clone()
        draft[read] = best if ids is None else ids[best]
        drafts.append(draft)
        right.append((draft == truth) & read)
        return draft

    found = drafter.features(batch, gamma, guess)
    if not right:  # a method that reads no drafts
        for k, features in enumerate(found):
            guess(k, features)
    missing = gamma - len(right)  # fewer heads than γ
    return drafts, right + [torch.zeros_like(right[0])] * missing
