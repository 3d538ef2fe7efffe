"""The decoding loop: sequences in batch slots, one fused step after another.

Between two steps requests join (their prompts are prefilled alone, a chunk a step), finish and leave.
The engine decides what is accepted; this module appends tokens, keeps lengths and looks at stop
conditions, nothing more.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from engines.acceptance import AcceptanceStats
from engines.bundle import EngineFacts
from engines.drafting.adaptive import DraftLength
from engines.drafting.ngram import NgramIndex
from engines.errors import EngineError, UsageError
from engines.sampling import SamplingParams
from engines.sessions.base import IntArray, StepInputs, StepOutputs, StepSession
from engines.uniforms import uniforms

__all__ = ["Completion", "Decoder", "FinishReason", "PhaseTimes", "Request", "RequestError"]

PREFILL_CHUNK = 256  # prompt tokens a step: bounds both activations and the stall of running streams
NGRAM_PRIOR = (0.25, 0.45, 0.6, 0.75, 0.8, 0.85, 0.9)  # α by match length, before a sequence shows its own


class RequestError(UsageError):
    """A request asks for something that the engine cannot do."""

    rule = "request.invalid"
    remedy_text = "Change the request, or build an engine with larger limits."


class NonFiniteLogitsError(EngineError):
    """The target's logits were NaN or infinite."""

    rule = "engine.non-finite-logits"
    remedy_text = "Check the checkpoint for NaN and infinite weights, then build again."


class FinishReason(Enum):
    """Why a sequence ended."""

    STOP_TOKEN = "stop_token"
    STOP_TEXT = "stop_text"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class Request:
    """One sequence to generate.

    Attributes:
        prompt: token ids, at least one.
        max_new_tokens: output tokens at most; None: up to the engine's context.
        stop_tokens: ids that end the output (and are not part of it); None: the engine's own.
        gamma: draft tokens a step at most; None: the engine's; 0: plain decoding.
        sequence: distinguishes sequences of one seed; part of the key of every random draw.
    """

    prompt: Sequence[int]
    max_new_tokens: int | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_tokens: frozenset[int] | None = None
    gamma: int | None = None
    sequence: int = 0


@dataclass(frozen=True)
class Completion:
    """A finished sequence."""

    tokens: list[int]
    reason: FinishReason
    acceptance: AcceptanceStats
    prefill_seconds: float  # from its first prefill call to its first token


@dataclass
class PhaseTimes:
    """Seconds by phase, over all sequences of a decoder."""

    prefill: float = 0.0
    propose: float = 0.0
    step: float = 0.0
    host: float = 0.0
    steps: int = 0


OnTokens = Callable[[list[int]], bool]  # returns True to stop the sequence


class _Sequence:
    """A request in a slot."""

    def __init__(
        self, request: Request, facts: EngineFacts, max_new: int, on_tokens: OnTokens | None
    ) -> None:
        self.request = request
        self.tokens = list(request.prompt)
        self.prompt_length = len(self.tokens)
        self.end = self.prompt_length + max_new
        self.length = 0  # positions in the target's cache
        self.draft_length = 0  # positions in the drafter's cache
        self.on_tokens = on_tokens
        stop = request.stop_tokens
        self.stop_tokens = frozenset(facts.eos_token_ids) if stop is None else stop
        self.gamma = facts.gamma if request.gamma is None else request.gamma
        self.stats = AcceptanceStats.empty(facts.gamma)
        self.reason: FinishReason | None = None
        self.started = 0.0
        self.prefill_seconds = 0.0
        self.match = 0
        self.ngrams: NgramIndex | None = None
        if facts.method == "ngram" and self.gamma > 0:
            self.ngrams = NgramIndex(facts.min_match, facts.max_match)
            self.ngrams.extend(self.tokens)
            self.policy = DraftLength(facts.step_cost or [1.0], NGRAM_PRIOR)

    @property
    def prefilled(self) -> bool:
        return self.length >= self.prompt_length

    def room(self, gamma: int) -> int:
        """Draft tokens worth verifying: the last token of the output comes from the target anyway."""
        return max(0, min(self.gamma, gamma, self.end - len(self.tokens) - 1))


class Decoder:
    """Generates with one engine.

    Args:
        session: a loaded engine.
        facts: the manifest's engine section.
    """

    def __init__(self, session: StepSession, facts: EngineFacts) -> None:
        self._session = session
        self._facts = facts
        self._waiting: deque[tuple[int, _Sequence]] = deque()
        self._active: list[tuple[int, _Sequence]] = []  # index = slot
        self._next_id = 0
        self.times = PhaseTimes()

    # -- the public face --------------------------------------------------------------------------

    def submit(self, request: Request, on_tokens: OnTokens | None = None) -> int:
        """Queue a request; returns its id.

        Args:
            on_tokens: called with each new output token; returns True to stop behind it.

        Raises:
            RequestError: the prompt is empty or too long, a token or γ is out of range.
        """
        self._check(request)
        room = self._facts.max_seq_len - len(request.prompt)
        max_new = room if request.max_new_tokens is None else min(request.max_new_tokens, room)
        self._next_id += 1
        self._waiting.append((self._next_id, _Sequence(request, self._facts, max_new, on_tokens)))
        return self._next_id

    def cancel(self, request_id: int) -> None:
        """End a request; its slot is free before the next step. Unknown ids are ignored."""
        for queued_id, sequence in [*self._waiting, *self._active]:
            if queued_id == request_id:
                sequence.reason = FinishReason.CANCELLED

    def clear(self) -> None:
        """Drop all requests, queued and running."""
        self._waiting.clear()
        self._active.clear()

    def run(self, requests: Iterable[Request]) -> list[Completion]:
        """Generate for all requests, in batches as slots allow; results in the order given."""
        ids = [self.submit(request) for request in requests]
        done: dict[int, Completion] = {}
        while self.busy:
            done.update(self.step())
        return [done[i] for i in ids]

    @property
    def busy(self) -> bool:
        """Is any request queued or running?"""
        return bool(self._waiting or self._active)

    def step(self) -> dict[int, Completion]:
        """Admit, prefill one chunk, decode one step; returns what finished, by request id."""
        begin = time.perf_counter()
        inside = self.times.prefill + self.times.step + self.times.propose
        finished = self._leave()
        while self._waiting and len(self._active) < self._session.slots:
            entry = self._waiting.popleft()
            if entry[1].end == entry[1].prompt_length and entry[1].reason is None:
                entry[1].reason = FinishReason.LENGTH
            if entry[1].reason is not None:
                finished[entry[0]] = _completion(entry[1])
                continue
            self._active.append(entry)
        self._prefill()
        finished.update(self._leave())  # a first token may have been the last
        self._decode()
        finished.update(self._leave())
        spent = self.times.prefill + self.times.step + self.times.propose - inside
        self.times.host += time.perf_counter() - begin - spent
        return finished

    def next_logits(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """The target's logits [vocabulary] behind `tokens`, without drafting. Only between requests.

        Raises:
            RequestError: as for a prompt.
        """
        assert not self._active
        self._check(Request(tokens))
        sequence = _Sequence(Request(tokens), self._facts, 0, None)
        self._active = [(0, sequence)]
        try:
            for start in range(0, len(tokens), PREFILL_CHUNK):
                chunk = np.array([tokens[start : start + PREFILL_CHUNK]], np.int64)
                outputs = self._run([sequence], 0, chunk, context=None, want_logits=True)
                sequence.length += chunk.shape[1]
        finally:
            self._active = []
        assert outputs.logits is not None
        logits: npt.NDArray[np.float32] = outputs.logits[0, 0]
        return logits

    # -- phases -----------------------------------------------------------------------------------

    def _prefill(self) -> None:
        """One chunk of the first unfinished prompt; several short prompts may follow each other."""
        budget = PREFILL_CHUNK
        for slot, (_, sequence) in enumerate(self._active):
            while not sequence.prefilled and sequence.reason is None and budget > 0:
                begin = time.perf_counter()
                sequence.started = sequence.started or begin
                stop = min(sequence.length + budget, sequence.prompt_length)
                chunk = np.array([sequence.tokens[sequence.length : stop]], np.int64)
                budget -= chunk.shape[1]
                outputs = self._run([sequence], slot, chunk, context=chunk)
                now = time.perf_counter()
                self.times.prefill += now - begin
                sequence.length = sequence.draft_length = stop
                if stop == sequence.prompt_length:
                    sequence.prefill_seconds = now - sequence.started
                    self._append(sequence, [int(outputs.emitted[0, 0])])

    def _decode(self) -> None:
        """One fused step over the slots whose prompts are done."""
        ready = [sequence for _, sequence in self._active if sequence.prefilled]  # in slots 0, 1, …
        if not ready:
            return
        begin = time.perf_counter()
        drafts, counts, steps = self._propose(ready)
        tokens = np.array([[s.tokens[-1]] for s in ready], np.int64)
        context = self._draft_context(ready, steps)
        proposed = time.perf_counter()
        outputs = self._run(ready, 0, tokens, context=context, steps=steps, drafts=drafts, counts=counts)
        done = time.perf_counter()
        self.times.propose += proposed - begin
        self.times.step += done - proposed
        self.times.steps += 1
        for i, sequence in enumerate(ready):
            accepted, drafted = int(outputs.accepted[i]), int(counts[i])
            sequence.stats.record(drafted, accepted)
            if sequence.ngrams is not None:
                sequence.policy.observe(sequence.match, drafted, accepted)
            known = len(sequence.tokens)
            sequence.length = known + accepted
            if context is not None and context.shape[1]:
                # Of the draft tokens, the drafter itself has run all but the last.
                sequence.draft_length = known + min(accepted, max(steps - 1, 0))
            self._append(sequence, [int(t) for t in outputs.emitted[i, : accepted + 1]])

    def _propose(self, ready: list[_Sequence]) -> tuple[IntArray | None, IntArray, int]:
        """Draft tokens (host-side methods), their counts, and the number of in-graph steps."""
        limits = [s.room(self._facts.gamma) for s in ready]
        if self._facts.method in ("draft_model", "layer_skip"):
            return None, np.array(limits, np.int64), max(limits)
        rows: list[list[int]] = []
        for sequence, limit in zip(ready, limits, strict=True):
            draft: list[int] = []
            if sequence.ngrams is not None and limit > 0:
                proposal = sequence.ngrams.propose(limit)
                sequence.match = proposal.match
                draft = proposal.tokens[: sequence.policy.choose(proposal.match, limit, len(ready))]
            rows.append(draft)
        counts = np.array([len(r) for r in rows], np.int64)
        width = int(counts.max())
        drafts = np.array([r + [0] * (width - len(r)) for r in rows], np.int64).reshape(len(rows), width)
        return drafts, counts, 0

    def _draft_context(self, ready: list[_Sequence], steps: int) -> IntArray | None:
        """Committed tokens for the drafter's own cache: equally many a sequence, as the longest lag asks.

        A sequence that lags less repeats tokens; writing them again changes nothing. One that does not
        speculate does not count: its drafter is never asked.
        """
        if self._facts.draft_cache is None or steps == 0:
            return None
        lag = max(len(s.tokens) - s.draft_length for s in ready if s.gamma > 0)
        width = min(lag, min(len(s.tokens) for s in ready))
        return np.array([s.tokens[len(s.tokens) - width :] for s in ready], np.int64)

    def _run(
        self,
        sequences: list[_Sequence],
        slot: int,
        tokens: IntArray,
        *,
        context: IntArray | None,
        steps: int = 0,
        drafts: IntArray | None = None,
        counts: IntArray | None = None,
        want_logits: bool = False,
    ) -> StepOutputs:
        batch, width = tokens.shape
        rows = 1 + (steps if drafts is None else drafts.shape[1])
        sampling = [s.request.sampling for s in sequences]
        temperature = np.array([p.temperature for p in sampling], np.float32)
        if temperature.any():
            draws = uniforms(
                np.array([p.seed for p in sampling], np.uint64),
                np.array([s.request.sequence for s in sequences], np.uint64),
                np.array([len(s.tokens) for s in sequences], np.int64),
                rows,
            )
        else:
            draws = np.zeros((batch, rows, 3), np.float32)
        own_cache = self._facts.draft_cache is not None and context is not None
        starts = [s.draft_length for s in sequences]
        if own_cache and steps:
            starts = [len(s.tokens) - context.shape[1] for s in sequences]  # type: ignore[union-attr]
        longest = max(len(s.tokens) for _, s in self._active)
        self._session.reserve(longest + self._facts.gamma + 1)
        outputs = self._session.step(
            StepInputs(
                slot=slot,
                tokens=tokens,
                token_counts=np.full(batch, width, np.int64),
                lengths=np.array([s.length for s in sequences], np.int64),
                draft_counts=np.zeros(batch, np.int64) if counts is None else counts,
                temperature=temperature,
                top_k=np.array([p.top_k for p in sampling], np.int64),
                top_p=np.array([p.top_p for p in sampling], np.float32),
                uniforms=draws,
                draft_tokens=drafts,
                draft_steps=steps,
                draft_context=context if own_cache else None,
                draft_lengths=np.array(starts, np.int64) if own_cache else None,
            ),
            want_logits=want_logits,
        )
        if not outputs.finite.all():
            raise NonFiniteLogitsError(
                f"NaN or infinity among the target's logits after {len(sequences[0].tokens)} tokens"
            )
        return outputs

    # -- bookkeeping ------------------------------------------------------------------------------

    def _append(self, sequence: _Sequence, tokens: list[int]) -> None:
        """Take emitted tokens until a stop condition holds."""
        kept: list[int] = []
        for token in tokens:
            if token in sequence.stop_tokens:
                sequence.reason = FinishReason.STOP_TOKEN
                break
            kept.append(token)
            if sequence.on_tokens is not None and sequence.on_tokens([token]):
                sequence.reason = FinishReason.STOP_TEXT
                break
            if len(sequence.tokens) + len(kept) >= sequence.end:
                sequence.reason = FinishReason.LENGTH
                break
        sequence.tokens += kept
        if sequence.ngrams is not None:
            sequence.ngrams.extend(kept)

    def _leave(self) -> dict[int, Completion]:
        """Free the slots of finished sequences; the last slots' caches move into the gaps."""
        finished: dict[int, Completion] = {}
        for slot in range(len(self._active) - 1, -1, -1):
            request_id, sequence = self._active[slot]
            if sequence.reason is None:
                continue
            finished[request_id] = _completion(sequence)
            # Sequences that decode keep the first slots, those in prefill follow: a gap among the
            # former is filled by the last of them, whose own gap is then filled by the very last.
            decoding = sum(s.prefilled for _, s in self._active)
            for source in (decoding - 1, len(self._active) - 1):
                if slot < source:
                    self._active[slot] = self._active[source]
                    moved = self._active[slot][1]
                    self._session.move(source, slot, moved.length, moved.draft_length)
                    slot = source
            self._active.pop()
        return finished

    def _check(self, request: Request) -> None:
        facts = self._facts
        if not request.prompt:
            raise RequestError("the prompt is empty", place="prompt", allowed="at least one token")
        if len(request.prompt) > facts.max_seq_len:
            raise RequestError(
                f"a prompt of {len(request.prompt)} tokens",
                place="prompt",
                allowed=f"at most {facts.max_seq_len} tokens, prompt and output together",
            )
        wrong = next((t for t in request.prompt if not 0 <= t < facts.vocab_size), None)
        if wrong is not None:
            raise RequestError(f"token id {wrong}", place="prompt", allowed=f"0 … {facts.vocab_size - 1}")
        if request.gamma is not None and not 0 <= request.gamma <= facts.gamma:
            raise RequestError(f"γ = {request.gamma}", place="gamma", allowed=f"0 … {facts.gamma}")
        if facts.verification == "greedy" and request.sampling.temperature > 0:
            raise RequestError(
                f"temperature {request.sampling.temperature}",
                place="sampling.temperature",
                allowed="0: this engine was built with verification: greedy",
            )
        if request.max_new_tokens is not None and request.max_new_tokens < 0:
            raise RequestError(
                f"max_new_tokens = {request.max_new_tokens}", place="max_new_tokens", allowed="0 or more"
            )


def _completion(sequence: _Sequence) -> Completion:
    assert sequence.reason is not None
    output = sequence.tokens[sequence.prompt_length :]
    return Completion(output, sequence.reason, sequence.stats, sequence.prefill_seconds)
