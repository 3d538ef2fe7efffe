"""The CPU session: onnxruntime with bound, preallocated buffers.

The caches are bound as input *and* output, so that onnxruntime appends in place and attention reads
them where they lie: no step copies a cache. Attention walks all positions that a bound cache has, so
a buffer of full capacity is viewed as one of just enough positions (`span`); the view is laid out
anew every SPAN_STEP tokens, which costs far less than slicing the cache every step.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from engines.bundle import CacheShape, EngineFacts
from engines.errors import EngineError
from engines.sessions.base import MAX_CONTEXT, Pending, StepInputs, StepOutputs
from engines.sessions.hugepages import collapse_anonymous_memory

__all__ = ["OnnxSession"]

SPAN_STEP = 128

FloatArray = npt.NDArray[np.float32]


class _Caches:
    """One model's caches for all slots: flat buffers, viewed as [slots, kv_heads, span, head_dim]."""

    def __init__(self, who: str, shape: CacheShape, slots: int, capacity: int) -> None:
        self.names = [f"{who}.{side}.{layer}" for side in ("k", "v") for layer in range(shape.layers)]
        self.span = min(SPAN_STEP, capacity)
        self._capacity = capacity
        self._shape = (slots, shape.kv_heads, shape.head_dim)
        # Zeroed pages are not resident before they are written: capacity costs nothing.
        size = slots * shape.kv_heads * capacity * shape.head_dim
        self._buffers = [np.zeros(size, np.float32) for _ in self.names]

    def views(self, span: int | None = None) -> list[FloatArray]:
        slots, heads, dim = self._shape
        positions = span or self.span
        size = slots * heads * positions * dim
        return [b[:size].reshape(slots, heads, positions, dim) for b in self._buffers]

    def fit(self, positions: int) -> bool:
        """Lay the views out for at least `positions`; True if they moved."""
        wanted = min(-(-positions // SPAN_STEP) * SPAN_STEP, self._capacity)
        if wanted == self.span or (wanted < self.span and 2 * wanted > self.span):
            return False
        kept = min(wanted, self.span)
        for old, new in zip(self.views(), self.views(wanted), strict=True):
            new[:, :, :kept] = old[:, :, :kept].copy()
        self.span = wanted
        return True

    def move(self, source: int, destination: int, length: int) -> None:
        for view in self.views():
            view[destination, :, :length] = view[source, :, :length]


class OnnxSession:
    """Runs `step.onnx`.

    Args:
        graph: the file; its weights lie beside it.
        facts: the manifest's engine section.
        threads: intra-op threads; 0 means one a core.
        slots: sequences to keep caches for; at most (and by default) `facts.max_batch_size`.

    Raises:
        EngineError: onnxruntime refuses the graph.
    """

    def __init__(
        self, graph: Path, facts: EngineFacts, *, threads: int = 0, slots: int | None = None
    ) -> None:
        self.slots = slots or facts.max_batch_size
        self._facts = facts
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads or os.cpu_count() or 1
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        options.enable_mem_pattern = False  # shapes change every step: a plan per shape would pile up
        try:
            self._session = ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise EngineError(
                f"onnxruntime {ort.__version__} refuses the graph: {error}", place=graph
            ) from error
        collapse_anonymous_memory()  # the packed weights: all of them are read in every step
        self._inputs = {i.name for i in self._session.get_inputs()}
        self._outputs = {o.name for o in self._session.get_outputs()}
        self._results = sorted(n for n in self._outputs if not n.endswith((".out", ".step")))
        self._target = _Caches("target", facts.target_cache, self.slots, facts.cache_capacity)
        self._drafter: _Caches | None = None
        if facts.draft_cache is not None:
            # A sequence that just joined may bring a whole chunk, which the others' rows are padded to.
            capacity = facts.cache_capacity + MAX_CONTEXT
            self._drafter = _Caches("drafter", facts.draft_cache, self.slots, capacity)
        self._bindings: dict[tuple[int, int, bool], ort.IOBinding] = {}

    @property
    def _caches(self) -> list[_Caches]:
        return [self._target] if self._drafter is None else [self._target, self._drafter]

    def reserve(self, positions: int, draft_positions: int = 0) -> None:
        """See `StepSession.reserve`."""
        moved = self._target.fit(positions)
        if self._drafter is not None:
            moved |= self._drafter.fit(draft_positions)
        if moved:
            self._bindings.clear()

    def step(self, inputs: StepInputs, *, want_logits: bool = False) -> StepOutputs:
        """See `StepSession.step`."""
        feeds = {k: v for k, v in self._feeds(inputs).items() if k in self._inputs}
        batch = inputs.tokens.shape[0]
        binding = self._binding(inputs.slot, batch, want_logits)
        for name, value in feeds.items():
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(value)))
        wanted = [n for n in self._results if n != "logits" or want_logits]
        for name in wanted:  # anew every step: their shapes follow the number of draft tokens
            binding.bind_output(name, "cpu")
        self._session.run_with_iobinding(binding)
        # Outputs come in the order of their first binding: the caches, then these.
        results = dict(zip(wanted, binding.get_outputs()[-len(wanted) :], strict=True))
        found = {name: value.numpy() for name, value in results.items()}
        verified = found.get("verified", inputs.draft_counts)
        return StepOutputs(
            accepted=found["accepted"],
            emitted=found["emitted"],
            finite=found["finite"],
            verified=verified,
            levels=found.get("levels", verified),
            drafted=found.get("drafted"),
            choice=found.get("choice"),
            features=found.get("features"),
            logits=found.get("logits"),
        )

    def _feeds(self, inputs: StepInputs) -> dict[str, npt.NDArray[np.generic]]:
        """Every input that some engine has."""
        batch = inputs.tokens.shape[0]
        none = np.zeros((batch, 0), np.int64)
        nothing = np.zeros((batch, 0, self._facts.feature_width), np.float32)
        pending = inputs.pending or Pending(none, np.zeros(batch, np.int64), np.zeros(batch, np.int64))
        return {
            "tokens": inputs.tokens,
            "token_counts": inputs.token_counts,
            "lengths": inputs.lengths,
            "draft_counts": inputs.draft_counts,
            "temperature": inputs.temperature,
            "top_k": inputs.top_k,
            "top_p": inputs.top_p,
            "uniforms": inputs.uniforms,
            "draft_tokens": none if inputs.draft_tokens is None else inputs.draft_tokens,
            "draft_parents": none if inputs.draft_parents is None else inputs.draft_parents,
            "draft_threshold": np.zeros(batch, np.float32)
            if inputs.draft_threshold is None
            else inputs.draft_threshold,
            "draft.tokens": pending.tokens,
            "draft.counts": pending.counts,
            "draft.lengths": pending.lengths,
            "draft.features": nothing if pending.features is None else pending.features,
        }

    def _binding(self, slot: int, batch: int, want_logits: bool) -> ort.IOBinding:
        """A binding with the caches of a slot range in place."""
        key = (slot, batch, want_logits)
        if key not in self._bindings:
            binding = self._session.io_binding()
            for caches in self._caches:
                for name, view in zip(caches.names, caches.views(), strict=True):
                    part = view[slot : slot + batch]
                    where = ("cpu", 0, np.float32, part.shape, part.ctypes.data)
                    binding.bind_input(name, *where)
                    for suffix in (".step", ".out"):  # a tree's cache is written twice, in place
                        if f"{name}{suffix}" in self._outputs:
                            binding.bind_output(f"{name}{suffix}", *where)
            self._bindings[key] = binding
        return self._bindings[key]

    def move(self, source: int, destination: int, length: int, draft_length: int) -> None:
        """See `StepSession.move`."""
        self._target.move(source, destination, length)
        if self._drafter is not None:
            self._drafter.move(source, destination, draft_length)
