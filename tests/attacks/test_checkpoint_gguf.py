"""GGUF files made to do harm: every edit ends in a converted folder or one of our errors, promptly."""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders.checkpoints.files import LfsPointerError, MissingFileError
from builders.checkpoints.gguf import convert_gguf
from builders.checkpoints.gguf_header import GgufMalformedError, read_gguf
from engines.errors import CheckpointError


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A whole, if senseless, Llama of one layer."""
    file = tmp_path_factory.mktemp("good") / "m.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    for key, value in {
        "block_count": 1,
        "context_length": 16,
        "embedding_length": 4,
        "feed_forward_length": 4,
        "attention.head_count": 1,
    }.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", "gpt-2")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "ab"])
    writer.add_array("tokenizer.ggml.token_type", [1, 1, 1])
    writer.add_array("tokenizer.ggml.merges", ["a b"])
    writer.add_tensor("token_embd.weight", np.ones((3, 4), np.float32))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", np.ones((4, 4), np.float32))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file.read_bytes()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def test_the_starting_point_is_good(good: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(good)
    assert convert_gguf(tmp_path / "m.gguf", tmp_path / "out").is_dir()


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_edited_bytes_raise_nothing_else(good: bytes, scratch: Path, data: st.DataObject) -> None:
    content = bytearray(good)
    for place in data.draw(st.lists(st.integers(0, len(good) - 1), max_size=4)):
        content[place] = data.draw(st.integers(0, 255))
    length = data.draw(st.just(len(good)) | st.integers(0, len(good)))
    file = scratch / "m.gguf"
    file.write_bytes(content[:length])
    with suppress(CheckpointError):
        convert_gguf(file, scratch / "out")
    assert {entry.name for entry in scratch.iterdir()} <= {"m.gguf", "out"}


@pytest.mark.parametrize("cut", [0, 3, 4, 7, 23, 24, 40, 200, -20])
def test_cut_short(good: bytes, tmp_path: Path, cut: int) -> None:
    (tmp_path / "m.gguf").write_bytes(good[:cut])
    with pytest.raises(GgufMalformedError):
        read_gguf(tmp_path / "m.gguf")


def header(
    pairs: bytes = b"", tensors: bytes = b"", *, counts: tuple[int, int] = (0, 0), version: int = 3
) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, counts[1], counts[0]) + pairs + tensors + bytes(64)


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def array(item: int, count: int) -> bytes:
    return string(b"k") + struct.pack("<IIQ", 9, item, count)


def tensor(*dims: int, kind: int = 0, offset: int = 0) -> bytes:
    return string(b"t") + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (header(version=1), "version 1"),
        (header(version=3 << 24), "big endian"),
        (header(counts=(1 << 63, 0)), ""),
        (header(counts=(0, 1 << 63)), ""),
        (header(array(0, 1 << 63), counts=(1, 0)), "cut short"),
        (header(array(8, 1 << 60), counts=(1, 0)), "cut short"),
        (header(array(9, 1), counts=(1, 0)), "neither numbers nor strings"),
        (header(string(b"k") + struct.pack("<I", 77), counts=(1, 0)), "unknown type 77"),
        (header(struct.pack("<Q", 1 << 60), counts=(1, 0)), "cut short"),
        (header(string(b"\xff") + struct.pack("<IB", 0, 1), counts=(1, 0)), "not UTF-8"),
        (header((string(b"k") + struct.pack("<IB", 0, 1)) * 2, counts=(2, 0)), "'k' twice"),
        (header(string(b"general.alignment") + struct.pack("<II", 4, 3), counts=(1, 0)), "power of two"),
        (header(string(b"general.alignment") + struct.pack("<II", 4, 0), counts=(1, 0)), "power of two"),
        (header(tensors=tensor(), counts=(0, 1)), "0 dimensions"),
        (header(tensors=tensor(1, 1, 1, 1, 1), counts=(0, 1)), "5 dimensions"),
        (header(tensors=tensor(1 << 62, 1 << 62), counts=(0, 1)), "cut short"),
        (header(tensors=tensor(4, offset=1 << 62), counts=(0, 1)), "cut short"),
        (header(tensors=tensor(0), counts=(0, 1)), "shape [0]"),
        (header(tensors=tensor(33, kind=2), counts=(0, 1)), "shape [33]"),
        (header(tensors=tensor(4, kind=250), counts=(0, 1)), "unknown ggml type 250"),
        (header(tensors=tensor(1) * 2, counts=(0, 2)), "'t' twice"),
    ],
)
def test_headers_that_lie(tmp_path: Path, content: bytes, found: str) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(GgufMalformedError) as error:
        read_gguf(tmp_path / "m.gguf")
    assert found in error.value.found


def test_no_gguf(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError):
        read_gguf(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_bytes(b"PK\x03\x04" + bytes(40))
    with pytest.raises(GgufMalformedError, match="starts with"):
        read_gguf(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(LfsPointerError):
        read_gguf(tmp_path / "m.gguf")
