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
from engines.drafting.lookahead import Lookahead, TreeProposal
from engines.drafting.suffix_automaton import SuffixAutomaton
from engines.errors import EngineError, UsageError
from engines.sampling import SamplingParams
from engines.sessions.base import (
    MAX_CONTEXT,
    FloatArray,
    IntArray,
    Pending,
    StepInputs,
    StepOutputs,
    StepSession,
)
from engines.uniforms import DRAWS, uniforms

__all__ = ["Completion", "Decoder", "FinishReason", "PhaseTimes", "Request", "RequestError"]


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
        gamma: draft tokens a step at most, of a tree levels; None: the engine's; 0: plain decoding.
        confidence_threshold: drafting stops where the drafter's own probability of its path falls below;
            None: the engine's; 0: never.
        sequence: distinguishes sequences of one seed; part of the key of every random draw.
    """

    prompt: Sequence[int]
    max_new_tokens: int | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_tokens: frozenset[int] | None = None
    gamma: int | None = None
    confidence_threshold: float | None = None
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
        self.features: FloatArray | None = None  # [n, F]: of the positions that the drafter has not read
        self.on_tokens = on_tokens
        stop = request.stop_tokens
        self.stop_tokens = frozenset(facts.eos_token_ids) if stop is None else stop
        self.gamma = facts.gamma if request.gamma is None else request.gamma
        threshold = request.confidence_threshold
        self.threshold = facts.confidence_threshold if threshold is None else threshold
        self.stats = AcceptanceStats.empty(facts.gamma)
        self.reason: FinishReason | None = None
        self.started = 0.0
        self.prefill_seconds = 0.0
        self.match = 0
        self.ngrams: SuffixAutomaton | None = None
        if facts.method == "ngram" and self.gamma > 0:
            self.ngrams = SuffixAutomaton(facts.min_match)
            self.ngrams.extend(self.tokens)
            self.policy = DraftLength(facts.step_cost or [1.0])
        self.lookahead: Lookahead | None = None
        if facts.lookahead is not None and self.gamma > 0:
            size = facts.lookahead
            self.lookahead = Lookahead(self.tokens, size.window, size.ngram, size.guesses)

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
            for start in range(0, len(tokens), MAX_CONTEXT):
                chunk = np.array([tokens[start : start + MAX_CONTEXT]], np.int64)
                outputs = self._run([sequence], 0, chunk, want_logits=True)
                sequence.length += chunk.shape[1]
        finally:
            self._active = []
        assert outputs.logits is not None
        logits: npt.NDArray[np.float32] = outputs.logits[0, 0]
        return logits

    # -- phases -----------------------------------------------------------------------------------

    def _prefill(self) -> None:
        """One chunk of the first unfinished prompt; several short prompts may follow each other."""
        budget = MAX_CONTEXT
        for slot, (_, sequence) in enumerate(self._active):
            while not sequence.prefilled and sequence.reason is None and budget > 0:
                begin = time.perf_counter()
                sequence.started = sequence.started or begin
                stop = min(sequence.length + budget, sequence.prompt_length)
                chunk = np.array([sequence.tokens[sequence.length : stop]], np.int64)
                budget -= chunk.shape[1]
                pending = self._pending([sequence], stop)
                outputs = self._run([sequence], slot, chunk, pending=pending)
                self._keep_features(sequence, outputs, 0, chunk.shape[1])
                now = time.perf_counter()
                self.times.prefill += now - begin
                sequence.length = stop
                if stop == sequence.prompt_length:
                    sequence.prefill_seconds = now - sequence.started
                    first = [int(outputs.emitted[0, 0])]
                    if sequence.lookahead is not None:
                        sequence.lookahead.extend(first)
                    self._append(sequence, first)

    def _decode(self) -> None:
        """One fused step over the slots whose prompts are done."""
        ready = [sequence for _, sequence in self._active if sequence.prefilled]  # in slots 0, 1, …
        if not ready:
            return
        begin = time.perf_counter()
        proposals, counts = self._propose(ready)
        tokens = np.array([[s.tokens[-1]] for s in ready], np.int64)
        pending = self._pending(ready, None)
        proposed = time.perf_counter()
        outputs = self._run(ready, 0, tokens, pending=pending, counts=counts, proposals=proposals)
        done = time.perf_counter()
        self.times.propose += proposed - begin
        self.times.step += done - proposed
        self.times.steps += 1
        for i, sequence in enumerate(ready):
            accepted, nodes = int(outputs.accepted[i]), int(outputs.verified[i])
            levels = nodes
            if self._facts.drafts_in_graph:
                levels = int(outputs.levels[i])
            elif proposals is not None:
                levels = _depth(proposals[i])
            sequence.stats.record(levels, accepted, nodes=nodes)
            if sequence.ngrams is not None:
                sequence.policy.observe(sequence.match, nodes, accepted)
            emitted = [int(t) for t in outputs.emitted[i, : accepted + 1]]
            if sequence.lookahead is not None and outputs.choice is not None:
                sequence.lookahead.observe(outputs.choice[i], emitted)
            sequence.length = len(sequence.tokens) + accepted
            self._keep_features(sequence, outputs, i, accepted + 1)
            self._append(sequence, emitted)

    def _propose(self, ready: list[_Sequence]) -> tuple[list[TreeProposal] | None, IntArray]:
        """The host's draft tokens, if it is the host that drafts, and `StepInputs.draft_counts`."""
        limits = [s.room(self._facts.gamma) for s in ready]
        if self._facts.drafts_in_graph:
            return None, np.array(limits, np.int64)
        proposals = []
        for sequence, limit in zip(ready, limits, strict=True):
            proposal = TreeProposal([], [])
            if sequence.lookahead is not None and limit > 0:
                proposal = sequence.lookahead.propose(self._facts.draft_tokens, limit)
            elif sequence.ngrams is not None and limit > 0:
                found = sequence.ngrams.propose(limit)
                sequence.match = found.match
                length = sequence.policy.choose(found.match, limit, len(ready))
                proposal = TreeProposal(found.tokens[:length], list(range(length)))
            proposals.append(proposal)
        return proposals, np.array([len(p.tokens) for p in proposals], np.int64)

    def _pending(self, sequences: list[_Sequence], stop: int | None) -> Pending | None:
        """What the drafter has not seen of each sequence that speculates, up to token `stop`.

        A drafter with a cache of its own reads what came since its last call; a head that also reads
        the target's features lags one token behind, for it sees each token with the feature before it.
        """
        facts = self._facts
        if facts.draft_cache is None and not facts.feature_width:
            return None
        rows: list[list[int]] = []
        for sequence in sequences:
            known = sequence.tokens[:stop]
            if sequence.gamma == 0:
                rows.append([])
            elif facts.feature_width:
                count = 0 if sequence.features is None else len(sequence.features)
                rows.append(
                    known[sequence.draft_length + 1 :][:count]
                    if facts.draft_cache
                    else known[len(known) - count :]
                )
            else:
                rows.append(known[sequence.draft_length :])
        width = max(len(r) for r in rows)
        features = None
        if facts.feature_width:
            features = np.zeros((len(rows), width, facts.feature_width), np.float32)
            for i, sequence in enumerate(sequences):
                if rows[i] and sequence.features is not None:
                    features[i, : len(rows[i])] = sequence.features
        return Pending(
            tokens=np.array([r + [0] * (width - len(r)) for r in rows], np.int64).reshape(len(rows), width),
            counts=np.array([len(r) for r in rows], np.int64),
            lengths=np.array([s.draft_length for s in sequences], np.int64),
            features=features,
        )

    def _keep_features(self, sequence: _Sequence, outputs: StepOutputs, row: int, count: int) -> None:
        """After a step: the drafter has read what was pending; `count` new positions have features."""
        if outputs.features is None or sequence.gamma == 0:
            return
        rows = outputs.features[row, :count]
        sequence.features = rows.copy() if self._facts.draft_cache is not None else rows[-1:].copy()

    def _run(
        self,
        sequences: list[_Sequence],
        slot: int,
        tokens: IntArray,
        *,
        pending: Pending | None = None,
        counts: IntArray | None = None,
        proposals: list[TreeProposal] | None = None,
        want_logits: bool = False,
    ) -> StepOutputs:
        facts, (batch, width) = self._facts, tokens.shape
        counts = np.zeros(batch, np.int64) if counts is None else counts
        nodes = int(counts.max())
        drafts = parents = None
        levels = facts.gamma if facts.drafts_in_graph else nodes
        if proposals is not None:
            drafts = np.array([_padded(p.tokens, nodes) for p in proposals], np.int64).reshape(batch, nodes)
            parents = np.array([_padded(p.parents, nodes) for p in proposals], np.int64).reshape(batch, nodes)
            levels = max(_depth(p) for p in proposals)
        sampling = [s.request.sampling for s in sequences]
        temperature = np.array([p.temperature for p in sampling], np.float32)
        if temperature.any():
            draws = uniforms(
                np.array([p.seed for p in sampling], np.uint64),
                np.array([s.request.sequence for s in sequences], np.uint64),
                np.array([len(s.tokens) for s in sequences], np.int64),
                levels + 1,
                lanes=facts.draws // DRAWS,
            )
        else:
            draws = np.zeros((batch, levels + 1, facts.draws), np.float32)
        longest = max(len(s.tokens) for _, s in self._active)
        pending_end = 0
        if facts.draft_cache is not None:
            pending_end = max(s.draft_length for _, s in self._active)
            pending_end += 0 if pending is None else pending.tokens.shape[1]
        self._session.reserve(longest + facts.draft_tokens + 1, pending_end)
        outputs = self._session.step(
            StepInputs(
                slot=slot,
                tokens=tokens,
                token_counts=np.full(batch, width, np.int64),
                lengths=np.array([s.length for s in sequences], np.int64),
                draft_counts=counts,
                temperature=temperature,
                top_k=np.array([p.top_k for p in sampling], np.int64),
                top_p=np.array([p.top_p for p in sampling], np.float32),
                uniforms=draws,
                draft_tokens=drafts,
                draft_parents=parents,
                draft_threshold=np.array([s.threshold for s in sequences], np.float32),
                pending=pending,
            ),
            want_logits=want_logits,
        )
        if pending is not None and facts.draft_cache is not None:
            for sequence, count in zip(sequences, pending.counts, strict=True):
                sequence.draft_length += int(count)
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
        threshold = request.confidence_threshold
        if threshold is not None and not 0 <= threshold <= 1:
            raise RequestError(
                f"confidence_threshold {threshold}", place="confidence_threshold", allowed="0 … 1"
            )
        if threshold and not facts.has_confidence:
            raise RequestError(
                f"confidence_threshold {threshold}",
                place="confidence_threshold",
                allowed=f"none: drafts of method {facts.method}"
                f"{' in a tree of fixed shape' if facts.drafts_in_graph else ''} have no confidence",
            )
        if request.max_new_tokens is not None and request.max_new_tokens < 0:
            raise RequestError(
                f"max_new_tokens = {request.max_new_tokens}", place="max_new_tokens", allowed="0 or more"
            )


def _completion(sequence: _Sequence) -> Completion:
    assert sequence.reason is not None
    output = sequence.tokens[sequence.prompt_length :]
    return Completion(output, sequence.reason, sequence.stats, sequence.prefill_seconds)


def _padded(values: list[int], width: int) -> list[int]:
    return values + [0] * (width - len(values))


def _depth(proposal: TreeProposal) -> int:
    """Levels of a proposed tree."""
    depths = [0]
    for parent in proposal.parents:
        depths.append(depths[parent] + 1)
    return max(depths)
