"""One training run from end to end: data, states, training, measurement, the head's folder.

Everything on the way is kept in a work folder, so that a stopped run goes on, and so that one set of
conversations and states serves all methods:

    WORK/data/      conversations (JSONL) and the target's states
    WORK/METHOD/    settings.json, checkpoint/
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from builders.checkpoints.heads.source import real_tokens
from builders.checkpoints.reader import read_checkpoint
from builders.checkpoints.types import Checkpoint
from builders.training.corpus import GenerationPlan, write_conversations
from builders.training.dialogue import Conversation, Template, normal
from builders.training.drafters import Drafter, DraftModel, Eagle, Eagle3, Medusa, Target
from builders.training.export import Store, round_to_store, write_head
from builders.training.features import FeatureStore, digest, held_out
from builders.training.layers import LayerShape
from builders.training.loop import Progress, Trained, TrainPlan, train
from builders.training.objective import Acceptance, simulate
from builders.training.states import collect_states, mend
from builders.training.text import TrainingTextError, read_user_text
from engines.errors import EngineError, MachineError, UsageError
from engines.files import atomic_write, publish_folder, read_json, sha256_file

__all__ = ["Sizes", "TrainingRun"]


class OutputTakenError(UsageError):
    """The output folder exists."""

    rule = "train.output-exists"
    remedy_text = "Choose another output folder, or delete this one."


class UnfinishedRunError(UsageError):
    """The work folder holds a run that was stopped."""

    rule = "train.unfinished"
    remedy_text = "Go on with --resume, or delete the folder to begin again."


class OtherSettingsError(UsageError):
    """What is in the work folder was made with other settings."""

    rule = "train.other-settings"
    remedy_text = "Give the settings of the first call, or another --work folder."


class BusyError(UsageError):
    """Another process trains the same method in the same work folder."""

    rule = "train.busy"
    remedy_text = "Wait for it, or give another --work folder."


class TargetTooSmallError(UsageError):
    """The target has fewer layers than the drafter needs."""

    rule = "train.target-too-small"
    remedy_text = "Choose another method, or fewer --layers."


class DivergedError(EngineError):
    """Training, or the target itself, made numbers that are none."""

    rule = "train.diverged"
    remedy_text = "Choose a smaller --learning-rate; does the target have finite weights?"


class NoDeviceError(MachineError):
    """The device that was asked for is not there."""

    rule = "train.no-device"
    remedy_text = "Use --device cpu."


@dataclass(frozen=True)
class Sizes:
    """Sizes of a drafter; those that a method does not have are ignored."""

    heads: int = 4
    layers: int = 1
    draft_vocab: int = 8192
    intermediate: int | None = None


@dataclass(frozen=True)
class TrainingRun:
    """What `trtspec train-head` was asked for.

    Exactly one of `text` and `generate` (attempts at conversations) is given. `excluded` prompts are
    kept out of training and measured separately.
    """

    method: str
    target: Path
    out: Path
    work: Path
    plan: TrainPlan
    sizes: Sizes = Sizes()
    text: Path | None = None
    generate: int | None = None
    store: Store = "fp16"
    device: str = "auto"
    resume: bool = False
    excluded: tuple[str, ...] = ()
    command: tuple[str, ...] = ()

    def run(self, say: Callable[[str], None], report: Callable[[Progress], None]) -> Trained:
        """Do it, and write the head.

        Args:
            say: takes a line about the data.
            report: takes the training's progress.

        Raises:
            UsageError: a narrow class of it: the output exists, other settings, bad text.
            CheckpointError: the target cannot be read.
            MachineError: no such device, disk full.
        """
        if self.out.exists():
            raise OutputTakenError("the folder exists", place=self.out)
        device = self._device()
        target = read_checkpoint(self.target)
        self._check_layers(target)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{self.out.name}.", dir=self.out.parent):
            pass  # better now than after the training
        if self.text is not None:
            _ = self._given  # refused before anything is written
        generation = GenerationPlan(seed=self.plan.seed, batch=min(128, self.generate or 128))
        settings = self._settings(target, generation)
        with _alone(self._folder):
            torch.set_flush_denormal(True)  # tiny probabilities mean nothing and are slow
            try:
                return self._run(target, settings, generation, device, say, report)
            finally:
                torch.set_flush_denormal(False)  # the caller's arithmetic is not ours to change

    def _run(
        self,
        target: Checkpoint,
        settings: dict[str, Any],
        generation: GenerationPlan,
        device: torch.device,
        say: Callable[[str], None],
        report: Callable[[Progress], None],
    ) -> Trained:
        self._claim(settings)
        model: Any = AutoModelForCausalLM.from_pretrained(
            self.target,
            dtype=torch.bfloat16 if self.plan.precision == "bf16" else torch.float32,
            use_safetensors=True,
        )
        model.eval().to(device)
        with _alone(self.work / "data", wait=True):
            store, benchmark = self._data(model, target, generation, say)
        indices = range(len(store.conversations))
        training = [i for i in indices if not held_out(store.conversations[i])]
        unseen = [i for i in indices if held_out(store.conversations[i])]
        measured = [i for i in unseen if store.conversations[i].temperature == 0]
        if not training or not measured:
            raise TrainingTextError(
                f"{len(training)} conversations to train on, {len(measured)} held out",
                place=self.text or "--generate",
                remedy="Give more text: one prompt in twenty is held out.",
            )
        drafter = self._drafter(model, target, store, training, device)
        del model
        say(f"{len(training)} conversations to train on, {len(measured)} held out")
        trained = train(
            drafter,
            store,
            training,
            measured,
            self.plan,
            self._folder / "checkpoint",
            device=device,
            report=report,
        )
        if not math.isfinite(trained.loss):
            raise DivergedError(f"held-out loss {trained.loss}", place=self._folder, allowed="a number")
        round_to_store(drafter, self.store)
        gamma = self.plan.gamma
        stored = simulate(drafter, store, measured, gamma, device)
        others = simulate(drafter, benchmark, range(len(benchmark.conversations)), gamma, device)
        provenance = {
            "trtspec": version("trtspec"),
            "method": self.method,
            "command": list(self.command),
            "seed": self.plan.seed,
            "target": {"name": target.path.name, "fingerprint": target.fingerprint},
            "settings": settings,
            "store": self.store,
            "data": {
                "origin": settings["data"],
                "conversations": {"training": len(training), "held_out": len(unseen)},
                "answer_tokens": {"training": _tokens(store, training), "held_out": _tokens(store, unseen)},
                "split": "by the SHA-256 of the prompt, one in twenty held out",
                "sha256": digest(store.conversations),
            },
            "training": {
                "steps": trained.steps,
                "minutes": round(trained.minutes, 2),
                "held_out_loss": round(trained.loss, 4),
            },
            "acceptance": {
                "held_out_prompts": _measured(stored),
                "benchmark_prompts": _measured(others),
                "held_out_prompts_before_storing": _measured(trained.acceptance),
            },
            "tools": {n: version(n) for n in ("torch", "transformers", "safetensors", "numpy")}
            | {"python": platform.python_version(), "device": str(device)},
        }
        with publish_folder(self.out) as folder:
            write_head(drafter, target, folder, self.store, provenance)
        return replace(trained, acceptance=stored)

    @property
    def _folder(self) -> Path:
        return self.work / self.method

    @cached_property
    def _template(self) -> Template:
        tokenizer = read_checkpoint(self.target).tokenizer
        return Template(self.target, tokenizer.eos_token_ids if tokenizer else ())

    @cached_property
    def _given(self) -> tuple[list[Conversation], list[Conversation]]:
        """The user's text: see `read_user_text`."""
        assert self.text is not None
        return read_user_text(self.text, self._template)

    def _check_layers(self, target: Checkpoint) -> None:
        found = target.config.num_layers
        least = {"eagle3": 3, "draft_model": self.sizes.layers}.get(self.method, 1)  # three taps
        if found < least:
            raise TargetTooSmallError(
                f"a target of {found} layers", place=target.path, allowed=f"{least} or more for this drafter"
            )

    def _device(self) -> torch.device:
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise NoDeviceError("torch sees no GPU", place="--device cuda")
        return torch.device(self.device)

    def _settings(self, target: Checkpoint, generation: GenerationPlan) -> dict[str, Any]:
        if self.text is not None:
            data: dict[str, Any] = {"text": self.text.name, "sha256": _sha256(self.text)}
        else:
            data = {"generated_by": "the target", "attempts": self.generate}
        return {
            "method": self.method,
            "target": target.fingerprint,
            "data": data | {"generation": asdict(generation)},
            "sizes": asdict(self.sizes),
            "plan": asdict(self.plan),
        }

    def _claim(self, settings: Mapping[str, Any]) -> None:
        """Note the settings in the work folder, or compare with those that are there."""
        file = self._folder / "settings.json"
        if file.exists():
            if not self.resume:
                raise UnfinishedRunError("a run of this method", place=self._folder)
            _compare(file, settings)
        atomic_write(file, json.dumps(settings, indent=2))

    def _data(
        self, model: Any, target: Checkpoint, generation: GenerationPlan, say: Callable[[str], None]
    ) -> tuple[FeatureStore, FeatureStore]:
        """(conversations, answers to the excluded prompts), both with states."""
        folder = self.work / "data"
        size = target.config.hidden_size
        note = folder / "data.json"
        wanted = self._settings(target, generation)
        wanted = {"target": wanted["target"], "data": wanted["data"]}
        if note.exists():
            _compare(note, wanted)
        atomic_write(note, json.dumps(wanted, indent=2))
        template = self._template
        refused = {normal(p) for p in self.excluded}

        def spoken(what: str, attempts: int) -> Callable[[int, int, int], None]:
            began = time.monotonic()

            def progress(made: int, left: int, tokens: int) -> None:
                if made % 64 == 0:
                    minutes = (time.monotonic() - began) / 60 * left / max(attempts - left, 1)
                    say(
                        f"{what}: {made} conversations, {tokens} answer tokens, {left} attempts left,"
                        f" about {minutes:.0f} min"
                    )

            return progress

        def write(
            file: Path, numbers: Iterable[int], given: Mapping[int, Conversation] | None, what: str
        ) -> None:
            known = {c.index for c in mend(file, 8 * size)}
            attempts = [i for i in numbers if i not in known]
            plan = generation if given is None else replace(generation, warm_share=0.0)
            if attempts:
                write_conversations(
                    model,
                    template,
                    file,
                    attempts,
                    replace(plan, batch=min(plan.batch, len(attempts))),
                    excluded=refused,
                    given=given,
                    tokens=real_tokens(target),
                    progress=spoken(what, len(attempts)),
                )

        if self.generate is not None:
            files = [folder / "conversations.jsonl"]
            write(files[0], range(self.generate), None, "writing")
        else:
            complete, asked = self._given
            first = len(complete)  # numbers go on after those of the conversations that were given
            complete = [c for c in complete if normal(c.prompt) not in refused]
            asked = [c for c in asked if normal(c.prompt) not in refused]
            # What is held out is answered by the target: acceptance is of its words, not of the text's.
            asked += [c for c in complete if held_out(c)]
            files = [folder / "given.jsonl", folder / "answered.jsonl"]
            collect_states(
                model,
                [c for c in complete if not held_out(c)],
                files[0],
                lambda done, total: say(f"reading: {done} of {total} tokens"),
            )
            answered = dict(enumerate(asked, first))
            write(files[1], answered, answered, "answering")
        benchmark = folder / "benchmark.jsonl"
        excluded = {i: template.unanswered(i, prompt) for i, prompt in enumerate(self.excluded)}
        write(benchmark, excluded, excluded, "answering the benchmark's prompts")
        return FeatureStore(files, size), FeatureStore([benchmark], size)

    def _drafter(
        self,
        model: Any,
        target: Checkpoint,
        store: FeatureStore,
        training: Sequence[int],
        device: torch.device,
    ) -> Drafter:
        config = target.config
        shape = LayerShape(
            config.hidden_size,
            self.sizes.intermediate or config.intermediate_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.rms_norm_eps,
            config.rope.theta,
        )
        embedding = model.get_input_embeddings().weight.detach()
        lm_head = model.get_output_embeddings().weight.detach()
        frozen = Target(embedding, lm_head, model.model.norm.weight.detach().float())
        vocabulary = frequent(store, training, real_tokens(target), self.sizes.draft_vocab).to(device)
        torch.manual_seed(self.plan.seed)
        drafter: Drafter
        if self.method == "medusa":
            drafter = Medusa(frozen, vocabulary, self.sizes.heads, self.sizes.layers)
        elif self.method == "eagle":
            drafter = Eagle(frozen, vocabulary, shape)
        elif self.method == "eagle3":
            drafter = Eagle3(frozen, vocabulary, shape)
        else:
            drafter = DraftModel(frozen, vocabulary, shape, self.sizes.layers)
            drafter.begin_as(model.state_dict(), config.num_layers)
        return drafter.to(device)


def frequent(store: FeatureStore, training: Sequence[int], tokens: int, size: int) -> torch.Tensor:
    """The `size` most frequent ids below `tokens` in the training answers, ascending; ties: the lower."""
    counts = np.zeros(tokens, np.int64)
    for i in training:
        conversation = store.conversations[i]
        np.add.at(counts, list(conversation.ids[conversation.start :]), 1)
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:size]))


@contextmanager
def _alone(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """While the block runs, no other process is in the folder's block.

    Raises:
        BusyError: one is, and `wait` is False.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError("another run", place=folder) from None
        yield  # a process that dies lets go of it


def _compare(file: Path, wanted: Mapping[str, Any]) -> None:
    """Refuse what differs, by the key's name."""
    found = read_json(file, max_bytes=1 << 20)
    here = json.loads(json.dumps(wanted))
    for key in sorted({*found, *here}):
        if found.get(key) != here.get(key):
            raise OtherSettingsError(f"{key}: {found.get(key)}", place=file, allowed=str(here.get(key)))


def _sha256(file: Path) -> str:
    return sha256_file(file) if file.is_file() else hashlib.sha256().hexdigest()


def _tokens(store: FeatureStore, indices: Sequence[int]) -> int:
    return sum(len(c.ids) - c.start for c in (store.conversations[i] for i in indices))


def _measured(acceptance: Acceptance) -> dict[str, Any]:
    return {
        "gamma": acceptance.gamma,
        "greedy_mean_acceptance_length": round(acceptance.mean_length, 4),
        "per_position": [round(p, 4) for p in acceptance.per_position],
        "top1": round(acceptance.top1, 4),
        "verify_steps": acceptance.steps,
    }
