"""The public API: open a bundle, generate text.

engine = Engine.open("build/bundles/smollm2-ngram")
result = engine.generate("Why is the sky blue?", max_new_tokens=64, on_text=print)
result.text, result.acceptance.acceptance_rate
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engines.acceptance import AcceptanceStats
from engines.bundle import Bundle, EngineFacts, open_bundle
from engines.decoding import Completion, Decoder, FinishReason, PhaseTimes, Request, RequestError
from engines.sampling import SamplingParams
from engines.sessions.base import StepSession
from engines.sessions.onnxruntime import OnnxSession
from engines.text import Detokenizer, StopTexts, TextCodec

__all__ = ["Engine", "Generation", "Prompt"]

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
OnText = Callable[[str], object]


@dataclass(frozen=True)
class Generation:
    """One finished output.

    Attributes:
        text: without special tokens; ends before a stop text.
        tokens: ids, without the stop token.
        acceptance: of draft tokens, over this output's steps.
        seconds: end to end, the wait for a slot included.
        prefill_seconds: first prefill call to first token.
    """

    text: str
    tokens: list[int]
    reason: FinishReason
    acceptance: AcceptanceStats
    seconds: float
    prefill_seconds: float


class _Stream:
    """Text of one sequence as it grows."""

    def __init__(self, codec: TextCodec, stops: Sequence[str], on_text: OnText | None) -> None:
        self._detokenizer = Detokenizer(codec)
        self._stops = StopTexts(stops)
        self._on_text = on_text
        self.text = ""

    def push(self, tokens: list[int]) -> bool:
        self._show(self._stops.push(self._detokenizer.push(tokens)))
        return self._stops.hit

    def finish(self) -> None:
        self._show(self._stops.push(self._detokenizer.flush()) + self._stops.flush())

    def _show(self, text: str) -> None:
        self.text += text
        if text and self._on_text is not None:
            self._on_text(text)


class Engine:
    """A bundle, loaded. Not thread-safe: one engine, one caller."""

    def __init__(self, facts: EngineFacts, session: StepSession, codec: TextCodec) -> None:
        self.facts = facts
        self.codec = codec
        self._decoder = Decoder(session, facts)

    @classmethod
    def open(cls, bundle: str | Path | Bundle, *, threads: int = 0, slots: int | None = None) -> Engine:
        """Check and load a bundle.

        Args:
            threads: CPU threads; 0: one a core.
            slots: sequences decoded together at most; None: the bundle's `max_batch_size`.

        Raises:
            BundleError: the bundle is incomplete or was edited.
            EngineError: the runtime refuses the graph.
        """
        opened = bundle if isinstance(bundle, Bundle) else open_bundle(Path(bundle))
        facts = opened.manifest.engine
        session = OnnxSession(opened.file(facts.graph), facts, threads=threads, slots=slots)
        return cls(facts, session, TextCodec(opened.path / "tokenizer"))

    @property
    def times(self) -> PhaseTimes:
        """Seconds by phase since the engine was opened."""
        return self._decoder.times

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids: text becomes a user message, messages go through the chat template, ids stay."""
        if isinstance(prompt, str):
            if self.codec.chat_template is None:
                return self.codec.encode(prompt)
            return self.codec.encode_chat([{"role": "user", "content": prompt}])
        messages = [item for item in prompt if isinstance(item, Mapping)]
        if messages and len(messages) == len(prompt):
            return self.codec.encode_chat(messages)
        try:
            return [operator.index(item) for item in prompt]  # type: ignore[arg-type]
        except TypeError as error:
            raise RequestError(
                "a mixed list", place="prompt", allowed="text, a list of messages, or a list of token ids"
            ) from error

    def top_gap(self, tokens: Sequence[int]) -> float:
        """Top-1 minus top-2 logit behind `tokens`: how near the argmax is to flipping."""
        second, first = np.partition(self._decoder.next_logits(tokens), -2)[-2:]
        return float(first - second)

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int | None = None,
        sampling: SamplingParams | None = None,
        stop: Sequence[str] = (),
        gamma: int | None = None,
        confidence_threshold: float | None = None,
        on_text: OnText | None = None,
    ) -> Generation:
        """Generate one output; see `generate_batch`. `on_text` is called with each new piece of text."""
        return self.generate_batch(
            [prompt],
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop=stop,
            gamma=gamma,
            confidence_threshold=confidence_threshold,
            on_text=None if on_text is None else lambda _, text: on_text(text),
        )[0]

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int | None = None,
        sampling: SamplingParams | None = None,
        stop: Sequence[str] = (),
        stop_tokens: Sequence[int] | None = None,
        gamma: int | None = None,
        confidence_threshold: float | None = None,
        on_text: Callable[[int, str], object] | None = None,
    ) -> list[Generation]:
        """Generate one output a prompt, decoding as many together as there are slots.

        Args:
            prompts: each a user message, a list of chat messages, or token ids.
            max_new_tokens: None: up to the engine's context.
            sampling: None: greedy. Output i is drawn as sequence i of the seed.
            stop: texts that end an output and are not part of it.
            stop_tokens: None: the model's own end-of-text tokens.
            gamma: draft tokens a step at most (of a tree: levels); None: the engine's own; 0: plain decoding.
            confidence_threshold: drafting stops where the drafter's own probability of what it has drafted
                falls below; None: the engine's own; 0: never.
            on_text: called with a prompt's index and its new text.

        Raises:
            RequestError: a prompt is empty or too long, or γ or the threshold is out of range.
            ChatTemplateError: the chat template refuses the messages.
            NonFiniteLogitsError: the target computed NaN or infinity.
        """
        begin = time.perf_counter()
        streams: dict[int, tuple[int, _Stream]] = {}
        results: dict[int, Generation] = {}
        try:
            for index, prompt in enumerate(prompts):
                show = None if on_text is None else _bind(on_text, index)
                stream = _Stream(self.codec, stop, show)
                request = Request(
                    prompt=self.encode(prompt),
                    max_new_tokens=max_new_tokens,
                    sampling=sampling or SamplingParams(),
                    stop_tokens=None if stop_tokens is None else frozenset(stop_tokens),
                    gamma=gamma,
                    confidence_threshold=confidence_threshold,
                    sequence=index,
                )
                streams[self._decoder.submit(request, stream.push)] = (index, stream)
            while len(results) < len(streams):
                for request_id, done in self._decoder.step().items():
                    index, stream = streams[request_id]
                    stream.finish()
                    results[index] = _generation(stream.text, done, time.perf_counter() - begin)
        except BaseException:
            self._decoder.clear()  # Ctrl-C or an error: the engine stays usable
            raise
        return [results[i] for i in range(len(streams))]


def _bind(on_text: Callable[[int, str], object], index: int) -> OnText:
    return lambda text: on_text(index, text)


def _generation(text: str, done: Completion, seconds: float) -> Generation:
    return Generation(text, done.tokens, done.reason, done.acceptance, seconds, done.prefill_seconds)
