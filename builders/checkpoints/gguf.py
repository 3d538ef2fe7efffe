"""GGUF → Hugging Face folder: weights dequantized, rows put back in order, tokenizer rebuilt.

Read as claims about a Llama-type decoder: every metadata key of the architecture and every tensor
must be one that is understood here; anything else is refused by name rather than dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from builders.checkpoints.architecture import prove
from builders.checkpoints.claims import Claims
from builders.checkpoints.gguf_header import GgufFile, GgufTensor, read_gguf
from builders.checkpoints.gguf_tokenizer import TokenizerFiles, tokenizer_files
from builders.checkpoints.safetensors_writer import (
    ELEMENT,
    TensorSpec,
    atomic_folder,
    fusable,
    write_safetensors,
)
from builders.checkpoints.types import Rope, TensorRef
from builders.graph.rope import inverse_frequencies
from engines.errors import CheckpointError

__all__ = ["GgufUnsupportedError", "convert_gguf"]

_OUTPUTS = frozenset(
    {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "additional_chat_templates",
    }
)
_CHUNK_VALUES = 4 << 20  # dequantized at a time: 16 MiB of float32, which stays near the cache
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_WITHIN = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(\d{1,5})\.(\w+)\.(weight|bias)")
_ROPE_FREQS = "rope_freqs.weight"
_KEYS = frozenset(
    {
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "vocab_size",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "rope.freq_base",
        "rope.dimension_count",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.finetuned",
        "expert_count",
        "expert_used_count",
    }
)


class GgufUnsupportedError(CheckpointError):
    """A GGUF file is well formed, and holds a model that cannot be converted."""

    rule = "checkpoint.gguf-unsupported"
    remedy_text = "Use a Llama-type model, or the original Hugging Face checkpoint."


def convert_gguf(
    source: Path,
    out: Path,
    *,
    dtype: Literal["F32", "F16", "BF16"] = "F32",
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Converts a Llama-type GGUF file to a Hugging Face checkpoint folder.

    Memory stays at one chunk of a tensor. The folder appears whole or not at all; an earlier
    conversion in its place is replaced.

    Args:
        source: the GGUF file, of any quantization that the `gguf` package can decode.
        out: the folder to write.
        dtype: of all weights written.
        progress: called with (bytes written, bytes in all).

    Returns:
        `out`.

    Raises:
        GgufMalformedError: the file is cut short or contradicts itself.
        GgufUnsupportedError: another architecture, or a feature that has no counterpart.
        CheckpointError: tensors are missing or do not fit together (see `architecture.prove`).
        GgufTokenizerError: the tokenizer cannot be rebuilt exactly.
        OutputExistsError: `out` holds something else than an earlier conversion.
        DiskFullError: no space for it.
    """
    file = read_gguf(source)
    model = _Model.of(file)
    tokenizer = tokenizer_files(file.metadata, source, model.context)
    if tokenizer.size > model.vocab_size:
        raise GgufUnsupportedError(
            f"{tokenizer.size} tokens",
            place=source,
            allowed=f"at most {model.vocab_size}, the embedding's rows",
        )
    tensors = {_renamed(file, name): tensor for name, tensor in file.tensors.items() if name != _ROPE_FREQS}
    specs = [TensorSpec(name, dtype, tensors[name].shape) for name in fusable(tensors)]
    config = model.config(dtype, tokenizer)
    _check(specs, config, source)

    def chunks(spec: TensorSpec) -> Iterator[npt.NDArray[Any]]:
        return _chunks(file, tensors[spec.name], model.heads(spec.name), model.head_dim, dtype)

    with atomic_folder(out, _OUTPUTS) as folder:
        write_safetensors(folder / "model.safetensors", specs, chunks, progress=progress)
        _write_json(folder / "config.json", config)
        _write_json(folder / "generation_config.json", tokenizer.generation)
        _write_json(folder / "tokenizer.json", tokenizer.tokenizer)
        _write_json(folder / "tokenizer_config.json", tokenizer.config)
        for name, template in tokenizer.chat_templates.items():
            _write_template(folder, name, template)
    return out


def _check(specs: Sequence[TensorSpec], config: Mapping[str, Any], source: Path) -> None:
    """Proves, before a byte is written, that the folder will be a checkpoint that can be read."""
    tensors = {s.name: TensorRef(s.name, s.dtype, s.shape, source, 0, s.length) for s in specs}
    _, contradictions = prove(tensors, Claims(config, source), str(source))
    if contradictions:
        raise GgufUnsupportedError(
            "; ".join(contradictions), place=source, allowed="metadata that fit the tensors"
        )


@dataclass(frozen=True)
class _Model:
    """The architecture as the metadata claims it."""

    num_layers: int
    context: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    epsilon: float
    vocab_size: int
    rope: dict[str, Any]
    tied: bool
    attention_bias: bool
    mlp_bias: bool

    @classmethod
    def of(cls, file: GgufFile) -> _Model:
        meta = _Metadata(file)
        embedding = file.tensors.get("token_embd.weight")
        if embedding is None:
            raise GgufUnsupportedError("no token_embd.weight", place=file.path)
        hidden = meta.integer("embedding_length")
        num_heads = meta.integer("attention.head_count")
        head_dim = meta.integer("attention.key_length", hidden // num_heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if meta.integer(key, head_dim) != head_dim:
                raise meta.error(key, f"{meta.integer(key)}", f"{head_dim}, the head's size")
        for key in ("expert_count", "expert_used_count"):
            if meta.get(key, 0):
                raise meta.error(key, f"{meta.get(key)}: a mixture of experts", "a dense model")
        context = meta.integer("context_length")
        return cls(
            num_layers=meta.integer("block_count"),
            context=context,
            hidden=hidden,
            intermediate=meta.integer("feed_forward_length"),
            num_heads=num_heads,
            num_kv_heads=meta.integer("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            epsilon=_round_float32(meta.number("attention.layer_norm_rms_epsilon")),
            vocab_size=embedding.shape[0],
            rope=_rope(meta, head_dim, context),
            tied="output.weight" not in file.tensors,
            attention_bias="blk.0.attn_q.bias" in file.tensors,
            mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        )

    def heads(self, name: str) -> int:
        """How many heads' rows of a tensor are interleaved; 0 where none are."""
        if ".q_proj." in name:
            return self.num_heads
        return self.num_kv_heads if ".k_proj." in name else 0

    def config(self, dtype: str, tokenizer: TokenizerFiles) -> dict[str, Any]:
        """config.json, as transformers ≥ 5 spells it."""
        spelled = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[dtype]
        ids = {k: v for k, v in tokenizer.generation.items() if k.endswith("_token_id")}
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.context,
            "rms_norm_eps": self.epsilon,
            "rope_parameters": self.rope,
            "attention_bias": self.attention_bias,
            "mlp_bias": self.mlp_bias,
            "tie_word_embeddings": self.tied,
            "dtype": spelled,
            **ids,
        }


class _Metadata:
    """The architecture's keys, typed, with errors that name the key."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        architecture = file.metadata.get("general.architecture")
        if architecture != "llama":
            raise GgufUnsupportedError(
                f"{architecture!r}", place=f"{file.path}:general.architecture", allowed="'llama'"
            )
        for key in file.metadata:
            name = key.removeprefix("llama.")
            if name != key and name not in _KEYS:
                raise self.error(name, "a feature that is not supported", ", ".join(sorted(_KEYS)))

    def error(self, key: str, found: str, allowed: str) -> GgufUnsupportedError:
        return GgufUnsupportedError(found, place=f"{self.file.path}:llama.{key}", allowed=allowed)

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"llama.{key}", default)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(key, "nothing" if value is None else repr(value)[:60], "a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.error(key, "nothing" if value is None else repr(value)[:60], "a positive number")
        return float(value)


def _round_float32(value: float) -> float:
    """The shortest decimal that is the same float32: metadata hold 1e-5 as 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rope(meta: _Metadata, head_dim: int, context: int) -> dict[str, Any]:
    """`rope_parameters` of config.json."""
    theta = _round_float32(meta.number("rope.freq_base", 10000.0))
    kind = meta.get("rope.scaling.type", "none")
    factors = meta.file.tensors.get(_ROPE_FREQS)
    if factors is not None:
        if kind != "none":
            raise meta.error("rope.scaling.type", f"{kind!r} beside {_ROPE_FREQS}", "one scaling")
        return {"rope_theta": theta, **_llama3(meta, factors, theta, head_dim, context)}
    if kind == "none":
        return {"rope_theta": theta, "rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise meta.error("rope.scaling.type", repr(kind), "none, linear, yarn")
    scaling = {
        "rope_theta": theta,
        "rope_type": kind,
        "factor": _round_float32(meta.number("rope.scaling.factor")),
    }
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = meta.integer("rope.scaling.original_context_length")
    return scaling


def _llama3(meta: _Metadata, tensor: GgufTensor, theta: float, head_dim: int, context: int) -> dict[str, Any]:
    """The scaling of Llama 3.1 whose frequency divisors these are.

    GGUF stores the divisors and not the parameters. Factor 8 over 8,192 positions and Llama's own
    two limits are tried, and the result must reproduce the stored divisors.
    """
    stored = dequantize(meta.file.rows(tensor), tensor.type).reshape(-1).astype(np.float64)
    if stored.shape == (head_dim // 2,) and stored.max() > 1:
        plain, _ = inverse_frequencies(Rope(theta), head_dim)
        factor = float(stored.max())
        for original in (8192, context, round(context / factor)):
            rope = Rope(theta, "llama3", factor, 1.0, 4.0, original)
            scaled, _ = inverse_frequencies(rope, head_dim)
            if np.allclose(plain / scaled, stored, rtol=1e-4, atol=0):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": original,
                }
    raise GgufUnsupportedError(
        "frequency factors that no llama3 scaling gives",
        place=f"{meta.file.path}:{_ROPE_FREQS}",
        allowed="the factors of Llama 3.1 (low 1, high 4)",
    )


def _renamed(file: GgufFile, name: str) -> str:
    """The Hugging Face name of a GGUF tensor."""
    if name in _TOP:
        return _TOP[name]
    block = _BLOCK.fullmatch(name)
    if block is None or block[2] not in _WITHIN:
        raise GgufUnsupportedError(
            "a tensor that a Llama-type model does not have", place=f"{file.path}:{name}"
        )
    return f"model.layers.{int(block[1])}.{_WITHIN[block[2]]}.{block[3]}"


def _chunks(
    file: GgufFile, tensor: GgufTensor, heads: int, head_dim: int, dtype: str
) -> Iterator[npt.NDArray[Any]]:
    """A tensor's values in `dtype`, some rows at a time, rotary rows in Hugging Face's order.

    GGUF interleaves the two halves of each head's rotary dimensions: rows are [heads, head_dim / 2,
    2], where Hugging Face has [heads, 2, head_dim / 2].
    """
    place = f"{file.path}:{tensor.name}"
    raw = file.rows(tensor)
    if heads and len(tensor.shape) == 1:  # a bias: its rows are its values
        raw = raw.reshape(tensor.shape[0], -1)
    width = tensor.shape[-1] if len(tensor.shape) > 1 else 1
    step = max(1, _CHUNK_VALUES // (width * head_dim)) * head_dim
    for start in range(0, len(raw), step):
        values = _dequantized(raw[start : start + step], tensor.type, place)
        if heads:
            halves = values.reshape(-1, head_dim // 2, 2, width).swapaxes(1, 2)
            values = np.ascontiguousarray(halves)
        yield _cast(values, dtype, place)


def _dequantized(raw: npt.NDArray[np.uint8], type_: GGMLQuantizationType, place: str) -> npt.NDArray[Any]:
    stored = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}.get(type_)
    if stored is not None:
        return np.asarray(raw).view(stored)
    try:
        return np.asarray(dequantize(np.asarray(raw), type_))
    except NotImplementedError as error:
        raise GgufUnsupportedError(f"the gguf package cannot decode {type_.name}", place=place) from error


def _cast(values: npt.NDArray[Any], dtype: str, place: str) -> npt.NDArray[Any]:
    with np.errstate(over="ignore"):
        cast = values.astype(ELEMENT[dtype], copy=False)
    if not np.isfinite(cast).all():
        raise GgufUnsupportedError(
            f"values that {dtype} cannot hold, or that are not numbers", place=place, allowed="finite weights"
        )
    return cast


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_bytes(json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n")


def _write_template(folder: Path, name: str, template: str) -> None:
    file = folder / "chat_template.jinja"
    if name != "default":
        file = folder / "additional_chat_templates" / f"{name}.jinja"
        file.parent.mkdir(exist_ok=True)
    file.write_bytes(template.encode())  # bytes: line ends stay as they are
