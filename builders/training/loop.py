"""The training loop of all methods: optimizers, cosine schedule, checkpoints, resume, evaluation."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save

from builders.training.drafters import Drafter
from builders.training.features import FeatureStore
from builders.training.objective import Acceptance, loss, simulate
from engines.files import publish_folder, read_json

__all__ = ["Progress", "TrainPlan", "Trained", "train"]

_STATE = "state.json"
_TENSORS = "state.safetensors"
_SHOW_SECONDS = 10
_QUICK = 32  # conversations of an evaluation on the way


@dataclass(frozen=True)
class TrainPlan:
    """How to train. With `steps` a run is a function of the plan and the data; with `minutes` the
    machine's speed has a say in it. Exactly one of both is given."""

    seed: int = 0
    steps: int | None = None
    minutes: float | None = None
    batch_tokens: int = 2048
    learning_rate: float = 1e-3
    warm_up: float = 0.04  # share of the run
    weight_decay: float = 0.01
    clip: float = 1.0
    depth: int = 4  # steps of a chain that are trained
    gamma: int = 4  # draft length of the simulation
    precision: str = "bf16"  # of matrix products; weights and their sums are float32


@dataclass(frozen=True)
class Progress:
    """What is shown as training goes on. What is held out is measured now and then."""

    step: int
    share: float  # of the run
    loss: float  # on training conversations, mean since the last report
    seconds_left: float
    held_out: tuple[float, Acceptance] | None = None  # (loss, acceptance)


@dataclass(frozen=True)
class Trained:
    """How a run ended."""

    steps: int
    minutes: float
    loss: float  # on held-out conversations
    acceptance: Acceptance


def train(
    drafter: Drafter,
    store: FeatureStore,
    training: Sequence[int],
    held_out: Sequence[int],
    plan: TrainPlan,
    checkpoint: Path,
    *,
    device: torch.device,
    report: Callable[[Progress], None],
    evaluate_seconds: float = 240,
    save_seconds: float = 120,
    stop_after: int | None = None,
) -> Trained:
    """Train `drafter` in place; go on from `checkpoint` if that folder exists.

    Args:
        training, held_out: indices of conversations; the held-out ones have greedy answers.
        checkpoint: folder that is replaced every `save_seconds` and at the end.
        evaluate_seconds: what is held out is measured so often, and in short runs every fifth.
        stop_after: stop (as a kill would) after this step.
    """
    parameters = {n: p for n, p in drafter.named_parameters() if p.requires_grad}
    optimizers = _optimizers(parameters, plan)
    step, epoch, position, before = _load(checkpoint, parameters, optimizers)
    began = shown = evaluated = saved = time.monotonic()
    recent: list[float] = []

    def share() -> float:
        if plan.steps is not None:
            return step / plan.steps
        assert plan.minutes is not None
        return (before + time.monotonic() - began) / (60 * plan.minutes)

    while share() < 1:
        rng = np.random.Generator(np.random.Philox(key=[plan.seed, epoch]))
        groups = list(store.batches(training, plan.batch_tokens, rng))
        while position < len(groups) and (done := share()) < 1:
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = plan.learning_rate * _schedule(done, plan.warm_up)
            batch = store.batch(groups[position], taps=drafter.needs_taps, device=device)
            with _precision(plan, device):
                value = loss(drafter, batch, drafter.depth(plan.depth, done))
            drafter.zero_grad(set_to_none=True)
            value.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(list(parameters.values()), plan.clip)
            for optimizer in optimizers:
                optimizer.step()
            step, position = step + 1, position + 1
            recent.append(value.item())
            now = time.monotonic()
            seconds = before + now - began
            if now - saved >= save_seconds:
                _save(checkpoint, parameters, optimizers, step, epoch, position, seconds)
                saved = now
            if step == stop_after:
                raise KeyboardInterrupt
            if now - shown > _SHOW_SECONDS:
                measured = None
                part = share()
                total = seconds / max(part, 1e-9)
                if now - evaluated > min(evaluate_seconds, total / 5):
                    measured = _measure(drafter, store, held_out[:_QUICK], plan, device)
                    evaluated = time.monotonic()
                mean, left = sum(recent) / len(recent), max(total - seconds, 0.0)
                report(Progress(step, part, mean, left, measured))
                recent, shown = [], now
        if position == len(groups):
            epoch, position = epoch + 1, 0
    seconds = before + time.monotonic() - began
    _save(checkpoint, parameters, optimizers, step, epoch, position, seconds)
    return Trained(step, seconds / 60, *_measure(drafter, store, held_out, plan, device))


def _measure(
    drafter: Drafter, store: FeatureStore, held_out: Sequence[int], plan: TrainPlan, device: torch.device
) -> tuple[float, Acceptance]:
    """(loss of the first step, acceptance of greedy chains)."""
    with _precision(plan, device), torch.no_grad():
        losses = [
            loss(drafter, store.batch(held_out[i : i + 8], taps=drafter.needs_taps, device=device), 1).item()
            for i in range(0, len(held_out), 8)
        ]
        return sum(losses) / max(len(losses), 1), simulate(drafter, store, held_out, plan.gamma, device)


def _precision(plan: TrainPlan, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=plan.precision == "bf16")


def _schedule(share: float, warm_up: float) -> float:
    """Linear rise, then half a cosine down to a twentieth."""
    if share < warm_up:
        return (share + 1e-3) / (warm_up + 1e-3)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min((share - warm_up) / (1 - warm_up), 1)))


def _optimizers(parameters: Mapping[str, torch.nn.Parameter], plan: TrainPlan) -> list[torch.optim.Optimizer]:
    """Muon for matrices, AdamW for norms and biases; both take the same learning rate.

    Muon (K. Jordan, 2024; scaled to AdamW's step size as in arXiv 2502.16982) needs fewer steps, and
    steps are what a CPU has few of.
    """
    matrices = [p for p in parameters.values() if p.ndim > 1]
    vectors = [p for p in parameters.values() if p.ndim == 1]
    muon = torch.optim.Muon(
        matrices,
        lr=plan.learning_rate,
        weight_decay=plan.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    if not vectors:
        return [muon]
    return [
        muon,
        torch.optim.AdamW(vectors, lr=plan.learning_rate, weight_decay=0.0, betas=(0.9, 0.95)),
    ]


def _save(
    folder: Path,
    parameters: Mapping[str, torch.nn.Parameter],
    optimizers: Sequence[torch.optim.Optimizer],
    step: int,
    epoch: int,
    position: int,
    seconds: float,
) -> None:
    tensors = {f"weight.{n}": p.detach().contiguous() for n, p in parameters.items()}
    for name, parameter in parameters.items():
        for optimizer in optimizers:
            for key, value in optimizer.state.get(parameter, {}).items():
                tensors[f"{key}.{name}"] = value.contiguous()
    with publish_folder(folder) as out:
        (out / _TENSORS).write_bytes(save(tensors))  # by way of Python: a full disk is an OSError
        state_json: dict[str, Any] = {"step": step, "epoch": epoch, "position": position, "seconds": seconds}
        (out / _STATE).write_text(json.dumps(state_json), "utf-8")


def _load(
    folder: Path,
    parameters: Mapping[str, torch.nn.Parameter],
    optimizers: Sequence[torch.optim.Optimizer],
) -> tuple[int, int, int, float]:
    """(step, epoch, position in it, seconds) of the checkpoint, or zeros."""
    if not folder.exists():
        return 0, 0, 0, 0.0
    state = read_json(folder / _STATE, max_bytes=1 << 16)
    tensors = load_file(folder / _TENSORS)
    for name, parameter in parameters.items():
        with torch.no_grad():
            parameter.copy_(tensors.pop(f"weight.{name}"))
    owners = {id(p): o for o in optimizers for group in o.param_groups for p in group["params"]}
    for name, value in tensors.items():
        key, _, of = name.partition(".")
        parameter = parameters[of]
        place = "cpu" if key == "step" else parameter.device
        owners[id(parameter)].state[parameter][key] = value.to(place)
    return state["step"], state["epoch"], state["position"], state["seconds"]
