"""The onnxruntime compiler: load the graph as it is, prove that it runs, and time a step.

onnxruntime optimizes and packs when a session starts, so nothing is written; what a build gains is
the certainty that the graph loads here, and the cost curve that adaptive drafting relies on.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engines.bundle import EngineFacts
from engines.errors import EngineError
from engines.sessions.base import Pending, StepInputs
from engines.sessions.onnxruntime import OnnxSession

__all__ = ["Compiled", "compile_step"]

ROUNDS = 7
PAST = 64  # cached positions while timing: a short conversation


@dataclass(frozen=True)
class Compiled:
    """What a trial run found.

    Attributes:
        load_seconds: from the file to a session.
        plain_seconds: one step without draft tokens, batch 1.
        step_cost: entry g: a step with g draft tokens (of a tree that the graph drafts: levels) in units of
            a plain step, drafting included.
    """

    load_seconds: float
    plain_seconds: float
    step_cost: list[float]


def compile_step(graph: Path, facts: EngineFacts, *, threads: int) -> Compiled:
    """Load `graph` and time steps of every number of draft tokens.

    Every round times each length once, so that a busy machine slows all of them; medians count.

    Raises:
        EngineError: the graph does not load, or its first step gives NaN or infinite logits.
    """
    begin = time.perf_counter()
    session = OnnxSession(graph, facts, threads=threads, slots=1)
    load_seconds = time.perf_counter() - begin
    session.reserve(PAST + facts.draft_tokens + 2, 2 * PAST)
    past = min(PAST, facts.max_seq_len // 2)
    session.step(_inputs(facts, np.ones((1, past), np.int64), 0, 0))
    most = facts.gamma if facts.drafts_in_graph else facts.draft_tokens
    seconds: list[list[float]] = [[] for _ in range(most + 1)]
    for round_number in range(ROUNDS + 1):
        for drafts in range(most + 1):
            inputs = _inputs(facts, np.ones((1, 1), np.int64), past, drafts)
            begin = time.perf_counter()
            outputs = session.step(inputs)
            if round_number:  # the first one warms up
                seconds[drafts].append(time.perf_counter() - begin)
            if not outputs.finite.all():
                raise EngineError("a step over ordinary tokens gives NaN or infinite logits", place=graph)
    medians = [statistics.median(s) for s in seconds]
    # More work cannot cost less: what looks so is noise.
    costs = np.maximum.accumulate(np.array(medians) / medians[0])
    return Compiled(load_seconds, medians[0], [round(float(c), 4) for c in costs])


def _inputs(
    facts: EngineFacts, tokens: np.ndarray[tuple[int, int], np.dtype[np.int64]], length: int, drafts: int
) -> StepInputs:
    levels = facts.gamma if facts.drafts_in_graph else drafts
    pending = None
    if facts.draft_cache is not None or facts.feature_width:
        count = 1 if facts.draft_cache is None else tokens.shape[1]
        pending = Pending(
            tokens=np.ones((1, count), np.int64),
            counts=np.array([count], np.int64),
            lengths=np.array([length], np.int64),
            features=np.zeros((1, count, facts.feature_width), np.float32),
        )
    return StepInputs(
        slot=0,
        tokens=tokens,
        token_counts=np.array([tokens.shape[1]], np.int64),
        lengths=np.array([length], np.int64),
        draft_counts=np.array([drafts], np.int64),
        temperature=np.zeros(1, np.float32),
        top_k=np.zeros(1, np.int64),
        top_p=np.ones(1, np.float32),
        uniforms=np.zeros((1, levels + 1, facts.draws), np.float32),
        draft_tokens=None if facts.drafts_in_graph else np.ones((1, drafts), np.int64),
        draft_parents=np.arange(drafts, dtype=np.int64)[None] if facts.method == "lookahead" else None,
        pending=pending,
    )
