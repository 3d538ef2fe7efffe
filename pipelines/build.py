"""From a deployment spec to a bundle: intake → pairing → quantize → emit → compile → package."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from builders.checkpoints.heads.types import EagleHead, MedusaHeads
from builders.checkpoints.reader import read_checkpoint
from builders.checkpoints.types import Checkpoint
from engines.bundle import (
    COMPLETE,
    MANIFEST,
    Bundle,
    CheckpointFacts,
    DynamicTree,
    EngineFacts,
    LookaheadSize,
    StaticTree,
    TypicalAcceptance,
    is_older_bundle,
    list_files,
    open_bundle,
    read_manifest,
    seal_bundle,
)
from engines.errors import EngineError, MachineError, TrtspecError, UsageError
from engines.exactness import TOLERANCES
from engines.files import atomic_write, link_or_copy, need_space, publish_folder, sha256_file
from pipelines.console import BuildConsole, duration, megabytes
from pipelines.spec import DeploymentSpec, DrafterSpec, DynamicTreeSpec
from pipelines.stages import RECORD, Progress, Result, Stage, StageCache, source_digest

__all__ = ["Build", "BuildRow", "Estimate", "LosslessnessError", "prompt_set", "summary"]

Drafter = Checkpoint | EagleHead | MedusaHeads
TOOLS = ("trtspec", "onnx", "onnxruntime", "numpy", "tokenizers", "gguf", "pydantic")
MEASURED_TOKENS = 48  # per prompt and arm: enough to see acceptance, short enough for every build
MAX_GAP = TOLERANCES["F32"]
TYPICAL_NOTE = "typical acceptance takes probable draft tokens, not only those that the target would draw"
INT8_NOTE = "int8 logits depend on the number of tokens in a step, so the text can differ from plain decoding"


class LosslessnessError(EngineError):
    """An engine that must be lossless is not."""

    rule = "engine.not-lossless"
    remedy_text = "Do not deploy this engine. Report it with the spec and the checkpoint."


class OutputError(UsageError):
    """The place for the bundle is taken."""

    rule = "build.output"
    remedy_text = "Choose another --output-dir, or move what is there."


class NoTokenizerError(UsageError):
    """The target has no tokenizer, so that no text could go in or come out."""

    rule = "build.no-tokenizer"
    remedy_text = "Put the model's tokenizer.json and tokenizer_config.json beside its weights."


class MethodError(UsageError):
    """The drafter's checkpoint holds another method's heads than the spec says."""

    rule = "spec.method"


class LimitError(UsageError):
    """The spec's limits do not fit the checkpoint."""

    rule = "spec.limits"


class NotEnoughMemoryError(MachineError):
    """The machine has less memory than the engine needs."""

    rule = "machine.memory"
    remedy_text = "Lower limits.max_batch_size or limits.max_seq_len, or use a larger machine."


@dataclass(frozen=True)
class Estimate:
    """Bytes that a build will need; `ram` is the engine's when it runs, `disk` what is not linked."""

    ram: int
    disk: int


@dataclass(frozen=True)
class BuildRow:
    """One engine in the final table."""

    bundle: Bundle
    path: Path
    seconds: Mapping[str, float]  # by stage; what was cached is left out


@dataclass
class Build:
    """One spec's build.

    Args:
        out: the bundle's folder.
        threads: CPU threads for timing; 0: one a core.
    """

    spec: DeploymentSpec
    cache: StageCache
    out: Path
    threads: int = 0
    command: Sequence[str] = ()
    console: BuildConsole = field(default_factory=BuildConsole)
    _seconds: dict[str, float] = field(default_factory=dict, init=False)

    # -- the stages -------------------------------------------------------------------------------

    def _intake_stage(self, source: Path) -> Stage | None:
        """The stage that makes a checkpoint a folder of plain safetensors files; None: it is one."""
        from builders.checkpoints.heads.convert import convert_head, needs_conversion

        if source.suffix == ".gguf" and source.is_file():
            return self._gguf_stage(source)
        if not needs_conversion(source):
            return None

        def work(folder: Path, progress: Progress) -> Mapping[str, Any]:
            convert_head(source, folder / "checkpoint")
            return {}

        files = [source] if source.is_file() else sorted(f for f in source.iterdir() if f.is_file())
        size = sum(f.stat().st_size for f in files)
        inputs = {
            "files": {f.name: sha256_file(f) for f in files},
            "code": source_digest("builders.checkpoints"),
        }
        return Stage("intake", inputs, work, seconds=size / 50e6, size=4 * size)

    def _gguf_stage(self, source: Path) -> Stage:
        from builders.checkpoints.gguf import convert_gguf

        def work(folder: Path, progress: Progress) -> Mapping[str, Any]:
            convert_gguf(source, folder / "checkpoint", dtype="F32", progress=progress)
            return {}

        size = source.stat().st_size
        inputs = {
            "file": sha256_file(source),
            "gguf": importlib.metadata.version("gguf"),
            "code": source_digest("builders.checkpoints", "builders.graph.rope"),
        }
        return Stage("intake", inputs, work, seconds=size / 15e6, size=6 * size)

    @cached_property
    def target(self) -> Checkpoint:
        """The target, converted first if it is a GGUF file."""
        return self._checkpoint(self.spec.target.checkpoint)

    @cached_property
    def drafter(self) -> Drafter | None:
        """The drafter's checkpoint, or its heads, where the method has any."""
        from builders.checkpoints.heads.reader import read_head

        path = self.spec.drafter.checkpoint
        if path is None:
            return None
        if self.spec.drafter.method == "draft_model":
            return self._checkpoint(path, borrow=self.target)
        head = read_head(self._converted(path), self.target)
        found = head.method
        if found != self.spec.drafter.method:
            raise MethodError(
                f"heads of method {found}",
                place=f"{self.spec.name}: drafter.checkpoint {path}",
                allowed=f"heads of method {self.spec.drafter.method}",
                remedy=f"Set drafter.method to {found}, or choose other heads.",
            )
        self._warn(head.warnings)
        return head

    def _checkpoint(self, path: Path, borrow: Checkpoint | None = None) -> Checkpoint:
        checkpoint = read_checkpoint(self._converted(path), borrow=borrow)
        self._warn(checkpoint.warnings)
        return checkpoint

    def _converted(self, path: Path) -> Path:
        """A folder of plain safetensors files, converted first if need be."""
        stage = self._intake_stage(path)
        return path if stage is None else self._run(stage).folder / "checkpoint"

    def _warn(self, warnings: Sequence[str]) -> None:
        for warning in warnings:
            self.console.line(f"{self.spec.name}: warning: {warning}")

    @cached_property
    def vocab_size(self) -> int:
        """Real tokens, common to target and drafter."""
        tokenizer = self.target.tokenizer
        width = self.target.config.vocab_size
        return width if tokenizer is None else min(tokenizer.size, width)

    def _pairing_stage(self, drafter: Drafter) -> Stage:
        from builders.checkpoints.heads.values import check_values
        from builders.pairing import pair, pair_head

        target, limit = self.target, self.spec.limits.max_seq_len

        def work(folder: Path, progress: Progress) -> Mapping[str, Any]:
            check_values(drafter)
            if isinstance(drafter, Checkpoint):
                return pair(target, drafter, max_seq_len=limit).to_dict()
            return pair_head(target, drafter)

        inputs = {
            "fingerprints": [target.fingerprint, drafter.fingerprint],
            "weights": _digests(drafter),
            "texts": [_text_digests(target), _text_digests(drafter)],
            "limit": limit,
            "code": source_digest("builders"),
        }
        return Stage("pairing", inputs, work)

    def _quantize_stage(self) -> Stage:
        from builders.quantize import quantize_int8

        target = self.target

        def work(folder: Path, progress: Progress) -> Mapping[str, Any]:
            quantize_int8(target, folder, progress=progress)
            return {}

        size = _weight_bytes(target) // 2
        inputs = {"weights": _digests(target), "code": source_digest("builders")}
        return Stage("quantize", inputs, work, seconds=size / 60e6, size=size)

    def _emit_stage(self, target: Checkpoint, drafter: Drafter | None) -> Stage:
        from builders.graph.step import emit_step

        facts = self.facts
        locations = {file: f"weights/target/{file.name}" for file in target.files}
        if drafter is not None:
            own = {file: f"weights/drafter/{file.name}" for file in drafter.files}
            locations = own | locations  # an embedding that is shared lies with the target

        def work(folder: Path, progress: Progress) -> Mapping[str, Any]:
            for file, relative in locations.items():
                link_or_copy(file, folder / relative)
            nodes = emit_step(target, drafter, facts, locations=locations, out=folder)
            (folder / "tokenizer").mkdir()
            for name in ("tokenizer.json", "tokenizer_config.json"):
                if (self.target.path / name).exists():
                    shutil.copyfile(self.target.path / name, folder / "tokenizer" / name)
            template = self.target.tokenizer.chat_template if self.target.tokenizer else None
            if template is not None:  # wherever the checkpoint keeps it
                atomic_write(folder / "tokenizer" / "chat_template.jinja", template)
            return {"nodes": nodes}

        inputs = {
            "weights": {"target": _digests(target), "drafter": _digests(drafter) if drafter else {}},
            "configs": [repr(target.config), repr(drafter)],
            "texts": _text_digests(self.target),
            "onnx": importlib.metadata.version("onnx"),
            "facts": facts.model_dump(mode="json"),
            "code": source_digest("builders", "engines", "pipelines.build"),
        }
        return Stage("emit", inputs, work, seconds=1.0, size=1_000_000)

    def _compile_stage(self, emit: Stage, emitted: Result) -> Stage:
        facts = self.facts

        def work(folder: Path, progress: Progress) -> Mapping[str, Any]:
            return self._measure(emitted.folder, facts, progress)

        inputs = {
            "graph": emit.key,
            "facts": facts.model_dump(mode="json"),
            "threads": self.threads,
            "machine": [platform.machine(), _processor(), os.cpu_count()],
            "onnxruntime": importlib.metadata.version("onnxruntime"),
            "prompts": hashlib.sha256(json.dumps(prompt_set()).encode()).hexdigest(),
            "code": source_digest("builders.compilers", "engines", "pipelines.build"),
        }
        return Stage("compile", inputs, work, seconds=40.0)

    @cached_property
    def facts(self) -> EngineFacts:
        """What the spec and the checkpoints say of the engine; measurements are added later."""
        from builders.graph.step import engine_shapes

        spec = self.spec
        int8 = spec.quantization.scheme == "int8"
        typical = spec.verification == "typical"
        tokenizer = self.target.tokenizer
        lookahead = spec.drafter.lookahead.model_dump()
        return EngineFacts(
            method=spec.drafter.method,
            gamma=spec.drafter.draft_length,
            tree=_tree_facts(spec.drafter),
            confidence_threshold=spec.drafter.confidence_threshold,
            lookahead=LookaheadSize(**lookahead) if spec.drafter.method == "lookahead" else None,
            exit_layer=spec.drafter.exit_layer,
            min_match=spec.drafter.min_match,
            verification=spec.verification,
            precision="int8" if int8 else "fp32",
            typical=TypicalAcceptance(**spec.typical.model_dump()) if typical else None,
            lossless=not int8 and not typical,
            lossless_note="; ".join(n for n, on in ((INT8_NOTE, int8), (TYPICAL_NOTE, typical)) if on),
            max_batch_size=spec.limits.max_batch_size,
            max_seq_len=spec.limits.max_seq_len,
            vocab_size=self.vocab_size,
            eos_token_ids=() if tokenizer is None else tokenizer.eos_token_ids,
            margin_tolerance=MAX_GAP,
            **engine_shapes(self.target, self.drafter),
        )

    def _measure(self, folder: Path, facts: EngineFacts, progress: Progress) -> Mapping[str, Any]:
        """Load the graph, time its steps, and generate the built-in prompts plain and speculating."""
        from builders.compilers.onnxruntime import compile_step
        from engines.engine import Engine
        from engines.measure import measure
        from engines.sessions.onnxruntime import OnnxSession
        from engines.text import TextCodec

        progress(0, 3)
        compiled = compile_step(folder / facts.graph, facts, threads=self.threads)
        progress(1, 3)
        found: dict[str, Any] = {
            "load_seconds": compiled.load_seconds,
            "plain_step_seconds": compiled.plain_seconds,
            "step_cost": compiled.step_cost,
        }
        if not (folder / "tokenizer" / "tokenizer.json").exists():
            return found
        timed = facts.model_copy(update={"step_cost": tuple(compiled.step_cost)})
        session = OnnxSession(folder / facts.graph, timed, threads=self.threads, slots=1)
        engine = Engine(timed, session, TextCodec(folder / "tokenizer"))
        room = facts.max_seq_len // 2
        prompts = [ids for p in prompt_set() if len(ids := engine.encode(p["text"])) <= room]
        if not prompts:
            return found
        measured = measure(engine, prompts, max_new_tokens=MEASURED_TOKENS, tolerance=facts.margin_tolerance)
        progress(3, 3)
        broken = [d for d in measured.divergences if not d.allowed]
        if broken and facts.lossless:
            first = broken[0]
            raise LosslessnessError(
                f"token {first.speculative_token} instead of {first.plain_token} at output position"
                f" {first.position}, where the two best logits are {first.gap:.4g} apart",
                place=self.spec.name,
                allowed=f"a difference where they are less than {facts.margin_tolerance} apart",
            )
        return found | measured.to_dict()

    # -- running ----------------------------------------------------------------------------------

    def run(self) -> BuildRow:
        """Build the bundle; finished stages are reused.

        Raises:
            TrtspecError: any of the tree; `out` is then as it was before.
        """
        begin = time.perf_counter()
        self._check_output()
        self._check_limits()
        pairing = None
        if self.drafter is not None:
            pairing = self._run(self._pairing_stage(self.drafter)).facts
        emit, emitted = self._emitted()
        compiled = self._run(self._compile_stage(emit, emitted)).facts
        bundle = self._package(emit, emitted, compiled, pairing)
        self.console.line(f"{self.spec.name}: {self.out} ({duration(time.perf_counter() - begin)})")
        return BuildRow(bundle, self.out, dict(self._seconds))

    def emit(self) -> Path:
        """Build up to the graph: a folder with `step.onnx`, its weights and the tokenizer.

        Raises:
            TrtspecError: as for `run`.
        """
        self._check_limits()
        return self._emitted()[1].folder

    def _emitted(self) -> tuple[Stage, Result]:
        target = self.target
        if self.spec.quantization.scheme == "int8":
            from builders.quantize import quantized_checkpoint

            quantized = self._run(self._quantize_stage())
            target = quantized_checkpoint(target, quantized.folder / "model-int8.safetensors")
        stage = self._emit_stage(target, self.drafter)
        return stage, self._run(stage)

    def _run(self, stage: Stage) -> Result:
        found = self.cache.find(stage)
        if found is None:
            need_space(self.cache.root, stage.size)
            with self.console.task(f"{self.spec.name}: {stage.name}") as progress:
                found = self.cache.run(stage, progress)
            self.console.line(f"{self.spec.name}: {stage.name} {duration(found.seconds)}")
        if not found.cached:
            self._seconds[stage.name] = self._seconds.get(stage.name, 0.0) + found.seconds
        return found

    def _check_output(self) -> None:
        """Only a bundle may be replaced, and only if nothing else lies in its folder."""
        if not self.out.exists() or (self.out.is_dir() and not any(self.out.iterdir())):
            return
        if is_older_bundle(self.out):
            return
        allowed = "a whole bundle, or nothing"
        try:
            ours = set(read_manifest(self.out).files) | {MANIFEST, COMPLETE}
            found = list_files(self.out)
        except TrtspecError as error:
            raise OutputError(f"no bundle: {error.found}", place=self.out, allowed=allowed) from error
        if strange := sorted(found - ours):
            raise OutputError(f"it holds {strange[0]}", place=self.out, allowed=allowed)

    def _check_limits(self) -> None:
        config, spec = self.target.config, self.spec
        if self.target.tokenizer is None:
            raise NoTokenizerError("no tokenizer.json", place=self.target.path)
        if spec.limits.max_seq_len > config.max_position:
            raise LimitError(
                f"max_seq_len {spec.limits.max_seq_len}",
                place=f"{spec.name}: limits.max_seq_len",
                allowed=f"at most {config.max_position}, the target's context",
                remedy=f"Set max_seq_len to {config.max_position} or less.",
            )
        exit_layer = spec.drafter.exit_layer
        if exit_layer is not None and exit_layer >= config.num_layers:
            raise LimitError(
                f"exit_layer {exit_layer}",
                place=f"{spec.name}: drafter.exit_layer",
                allowed=f"1 … {config.num_layers - 1}: the target has {config.num_layers} layers",
                remedy="Choose an earlier layer.",
            )
        heads = self.drafter.num_heads if isinstance(self.drafter, MedusaHeads) else spec.drafter.draft_length
        if spec.drafter.draft_length > heads:
            deep = "tree" if spec.drafter.tree is not None else "gamma"
            raise LimitError(
                f"{spec.drafter.draft_length} levels of draft tokens",
                place=f"{spec.name}: drafter.{deep}",
                allowed=f"at most {heads}: there are {heads} Medusa heads",
                remedy="Choose a shallower tree or a smaller gamma.",
            )
        tree, tokens = spec.drafter.tree, self._draft_vocabulary()
        width = tree.top_k if isinstance(tree, DynamicTreeSpec) else 0
        if isinstance(tree, tuple):
            width = max(spec.drafter.static_tree.level_widths)
        if width > tokens:
            raise LimitError(
                f"{width} candidates of one node",
                place=f"{spec.name}: drafter.tree",
                allowed=f"at most {tokens}, the drafter's vocabulary",
                remedy="Choose a narrower tree.",
            )
        have = _memory()
        need = self.estimate().ram
        if have and need > have:
            raise NotEnoughMemoryError(
                f"{megabytes(have)} of memory", place=spec.name, allowed=megabytes(need)
            )

    def _draft_vocabulary(self) -> int:
        """Tokens that the drafter chooses from."""
        if isinstance(self.drafter, EagleHead) and self.drafter.draft_to_target is not None:
            return len(self.drafter.draft_to_target)
        return self.target.config.vocab_size

    def _package(
        self, emit: Stage, emitted: Result, compiled: Mapping[str, Any], pairing: Mapping[str, Any] | None
    ) -> Bundle:
        facts = self.facts.model_copy(update={"step_cost": tuple(compiled["step_cost"])})
        manifest: dict[str, Any] = {
            "name": self.spec.name,
            "trtspec_version": importlib.metadata.version("trtspec"),
            "command": list(self.command),
            "tools": {tool: importlib.metadata.version(tool) for tool in TOOLS},
            "target": _checkpoint_facts(self.target),
            "drafter": _checkpoint_facts(self.drafter) if self.drafter else None,
            "pairing": pairing,
            "engine": facts,
            "measurements": dict(compiled),
        }
        place = hashlib.sha256(str(self.out.resolve()).encode()).hexdigest()[:32]
        with self.cache.lock("package", place):  # or another build's swap would look like a damaged bundle
            current = self._current(manifest)
            if current is not None:
                return current
            with publish_folder(self.out) as folder:
                for file in sorted(emitted.folder.rglob("*")):
                    relative = file.relative_to(emitted.folder)
                    if file.is_file() and file.name != RECORD:
                        link_or_copy(file, folder / relative)
                created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
                seal_bundle(folder, manifest | {"created": created})
            return open_bundle(self.out)

    def _current(self, manifest: Mapping[str, Any]) -> Bundle | None:
        """The bundle at `out`, if it already is what this build would write."""
        try:
            bundle = open_bundle(self.out)
        except TrtspecError:
            return None
        have = json.loads(bundle.manifest.model_dump_json())
        want = json.loads(json.dumps(manifest, default=lambda m: m.model_dump(mode="json")))
        ignored = ("command",)
        same = all(have[k] == v for k, v in want.items() if k not in ignored)
        return bundle if same else None

    # -- planning ---------------------------------------------------------------------------------

    def plan(self) -> Iterator[tuple[str, str, str]]:
        """(stage, state, note) in order, without writing anything.

        Raises:
            TrtspecError: what would stop the build is found now.
        """
        self._check_output()
        for path in (self.spec.target.checkpoint, self.spec.drafter.checkpoint):
            stage = None if path is None else self._intake_stage(path)
            if stage is None:
                continue
            if self.cache.find(stage) is None:
                yield "intake", "to run", f"convert {path}, about {duration(stage.seconds)}"
                yield "…", "to run", "the stages behind it follow from the converted checkpoint"
                return
            yield "intake", "cached", str(path)
        self._check_limits()
        yield "intake", "read", str(self.target.path)
        need = self.estimate()
        yield "needs", "", f"about {megabytes(need.ram)} of memory to run, {megabytes(need.disk)} of disk"
        stages: list[Stage] = []
        if self.drafter is not None:
            stages.append(self._pairing_stage(self.drafter))
        target = self.target
        if self.spec.quantization.scheme == "int8":
            stage = self._quantize_stage()
            stages.append(stage)
            found = self.cache.find(stage)
            if found is None:
                yield from self._states(stages)
                yield "…", "to run", "emit, compile and package follow from the quantized weights"
                return
            from builders.quantize import quantized_checkpoint

            target = quantized_checkpoint(target, found.folder / "model-int8.safetensors")
        emit = self._emit_stage(target, self.drafter)
        stages.append(emit)
        emitted = self.cache.find(emit)
        if emitted is not None:
            stages.append(self._compile_stage(emit, emitted))
        yield from self._states(stages)
        if emitted is None:
            yield "compile", "to run", "about 40 s"
        yield "package", "to run" if not (self.out / "_COMPLETE").exists() else "check", str(self.out)

    def _states(self, stages: Sequence[Stage]) -> Iterator[tuple[str, str, str]]:
        for stage in stages:
            found = self.cache.find(stage)
            note = f"took {duration(found.seconds)}" if found else f"about {duration(stage.seconds)}"
            yield stage.name, "cached" if found else "to run", note

    def estimate(self) -> Estimate:
        """Weights, caches and a tenth for activations; fp32 is what the CPU computes in."""
        limits, weights, cache, disk = self.spec.limits, 0, 0, 0
        positions = self.facts.cache_capacity
        for checkpoint in (self.target, self.drafter):
            if checkpoint is None:
                continue
            size = checkpoint.num_parameters * 4
            if self.spec.quantization.scheme == "int8":
                size = _weight_bytes(checkpoint) // 2
                disk += size
            weights += size
            if isinstance(checkpoint, MedusaHeads):
                continue
            c = checkpoint.config
            cache += 2 * c.num_layers * c.num_kv_heads * c.head_dim * positions * limits.max_batch_size * 4
        return Estimate(ram=int(weights * 1.3) + cache + 150_000_000, disk=disk + 5_000_000)


def _checkpoint_facts(checkpoint: Drafter) -> CheckpointFacts:
    return CheckpointFacts(
        path=str(checkpoint.path.name),
        fingerprint=checkpoint.fingerprint,
        family=checkpoint.config.family if isinstance(checkpoint, Checkpoint) else checkpoint.format,
        parameters=checkpoint.num_parameters,
        dtype=next(t.dtype for t in checkpoint.tensors.values() if len(t.shape) == 2),
    )


def _tree_facts(drafter: DrafterSpec) -> StaticTree | DynamicTree | None:
    if isinstance(drafter.tree, DynamicTreeSpec):
        return DynamicTree(top_k=drafter.tree.top_k, nodes=drafter.tree.nodes)
    return (
        None if drafter.tree is None else StaticTree(choices=drafter.tree, drawn=drafter.siblings == "drawn")
    )


def _weight_bytes(checkpoint: Drafter) -> int:
    return sum(t.length for t in checkpoint.tensors.values())


def _digests(checkpoint: Drafter) -> dict[str, str]:
    return {file.name: sha256_file(file) for file in checkpoint.files}


def _text_digests(checkpoint: Drafter) -> dict[str, str]:
    """Of everything beside the weights that intake reads."""
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    files = sorted([*folder.glob("*.json"), *folder.glob("*.jinja")])
    return {file.name: sha256_file(file) for file in files}


def _processor() -> str:
    """The processor's model name, where the system tells; timings hold for one model only."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def _memory() -> int:
    """Bytes of physical memory; 0 where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0


def prompt_set() -> list[dict[str, str]]:
    """The built-in prompts: two each of chat, JSON extraction, code edits and summaries."""
    text = (Path(__file__).parent / "prompts.json").read_text("utf-8")
    return [dict(p) for p in json.loads(text)]


def summary(rows: Sequence[BuildRow], console: BuildConsole) -> None:
    """The final tables: what was built, whether it pays, where the time went."""
    table, times = [], []
    for row in rows:
        manifest = row.bundle.manifest
        found, facts = manifest.measurements, manifest.engine
        parameters = manifest.target.parameters + (manifest.drafter.parameters if manifest.drafter else 0)
        cells = [manifest.name, megabytes(row.bundle.size), f"{parameters / 1e6:.0f} M"]
        if "speedup" in found:
            drafted = facts.gamma > 0
            rate = found["acceptance"]["acceptance_rate"]
            length = found["acceptance"]["mean_acceptance_length"]
            cells += [
                f"{rate:.0%}" if drafted and rate is not None else "–",
                f"{length:.2f}" if drafted and length is not None else "1.00",
                f"{found['tokens_per_second']:.1f}",
                f"{found['speedup']:.2f}" if drafted else "–",
                ("yes" if found["speedup"] > 1.02 else "no") if drafted else "–",
            ]
            phases = ("prefill_seconds", "step_seconds", "draft_seconds", "host_seconds")
            total = sum(found[p] for p in phases)
            built = sum(row.seconds.values())
            times.append([manifest.name, f"{built:.0f} s" if built else "cached"])
            times[-1].append(f"{found['load_seconds']:.1f} s")
            times[-1] += [f"{found[p] / total:.0%}" for p in phases]
            times[-1] += [f"{found['plain_step_seconds'] * 1e3:.1f} ms"]
        else:
            cells += ["–"] * 5
        table.append(cells)
    columns = ["engine", "size", "params", "accept", "tok/step", "tok/s", "× plain", "pays"]
    console.line("")
    console.table(columns, table)
    if times:
        console.line("")
        columns = ["where the time goes", "build", "load", "prefill", "steps", "draft", "host", "plain step"]
        console.table(columns, times)
        console.line(
            f"\nMeasured on {len(prompt_set())} prompts of {MEASURED_TOKENS} tokens, greedy, batch 1."
            " 'steps' includes drafting\ninside the graph. What a mode's own traffic gains may differ:"
            " measure it there."
        )
