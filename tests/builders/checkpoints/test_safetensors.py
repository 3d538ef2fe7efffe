"""The header reader agrees with the safetensors package and refuses what breaks the format."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from builders.checkpoints.files import BadJsonError, LfsPointerError, MissingFileError
from builders.checkpoints.safetensors import (
    HeaderError,
    PickleError,
    ShardIndexError,
    read_folder,
    read_header,
)
from engines.errors import CheckpointError


def raw(header: Any, data: bytes = b"", text: bytes | None = None) -> bytes:
    text = json.dumps(header).encode() if text is None else text
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


GOOD = raw({"a": entry(), "b": entry("F16", [1, 2], [8, 12]), "__metadata__": {"format": "pt"}}, bytes(12))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def test_a_file_of_the_safetensors_package(file: Path) -> None:
    arrays = {
        "x": np.arange(6, dtype=np.float32).reshape(2, 3),
        "y": np.ones(4, np.float16),
        "s": np.int64(7),
    }
    save_file({k: np.asarray(v) for k, v in arrays.items()}, file, metadata={"format": "pt"})
    tensors = read_header(file)
    content = file.read_bytes()
    assert {t.name: (t.dtype, t.shape) for t in tensors.values()} == {
        "x": ("F32", (2, 3)),
        "y": ("F16", (4,)),
        "s": ("I64", ()),
    }
    for name, array in arrays.items():
        place = tensors[name]
        assert content[place.offset : place.offset + place.length] == np.asarray(array).tobytes()


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "the file has 0 bytes"),
        (b"\x01\x02", "the file has 2 bytes"),
        (raw({}, text=b"{}")[:9], "announces a header of 2 bytes"),
        ((1 << 63).to_bytes(8, "little") + b"{}", "announces a header"),
        (GOOD[:-1], "the file has"),
        (GOOD + b"\0", "the file has"),
        (raw({"a": entry(), "b": entry(offsets=[4, 12])}, bytes(12)), "overlap"),
        (raw({"a": entry(), "b": entry(offsets=[12, 20])}, bytes(20)), "hole"),
        (raw({"a": entry(offsets=[8, 16])}, bytes(16)), "hole"),
        (raw({"a": entry("F33")}, bytes(8)), "dtype 'F33'"),
        (raw({"a": entry(["F32"])}, bytes(8)), "dtype ['F32']"),  # type: ignore[arg-type]
        (raw({"a": entry(shape=[3])}, bytes(8)), "8 bytes of data"),
        (raw({"a": entry(shape=[-1, -2])}, bytes(8)), "shape [-1, -2]"),
        (raw({"a": entry(shape=[True, 2])}, bytes(8)), "shape [True, 2]"),
        (raw({"a": entry(shape=[2.0])}, bytes(8)), "shape [2.0]"),
        (raw({"a": entry(shape=2)}, bytes(8)), "shape 2"),
        (raw({"a": entry(offsets=[8, 0])}, bytes(8)), "data_offsets [8, 0]"),
        (raw({"a": entry(offsets=[0])}, bytes(8)), "data_offsets [0]"),
        (raw({"a": {**entry(), "extra": 1}}, bytes(8)), "extra"),
        (raw({"a": 3}, bytes(8)), "3"),
        (raw({"__metadata__": {"a": 1}}), "not a map of strings"),
    ],
)
def test_a_broken_header_is_refused(file: Path, content: bytes, found: str) -> None:
    file.write_bytes(content)
    with pytest.raises(HeaderError) as error:
        read_header(file)
    assert found in error.value.found
    assert str(file) in error.value.place


def test_the_format_s_limit_on_headers(file: Path) -> None:
    with file.open("wb") as out:
        out.write((100_000_001).to_bytes(8, "little"))
        out.truncate(100_000_100)  # sparse
    with pytest.raises(HeaderError, match="a header of 100,000,001 bytes"):
        read_header(file)


@pytest.mark.parametrize(
    "text",
    [
        b'{"a":' + json.dumps(entry()).encode() + b',"a":' + json.dumps(entry()).encode() + b"}",
        b'{"a": {"dtype": "F32", "dtype": "F16"}}',
        b"{",
        b"[1]",
        b'{"\xff": 1}',
        b"[" * 50_000,
        b'{"a": ' + b"9" * 10_000 + b"}",
    ],
    ids=["name twice", "key twice", "cut", "no object", "not UTF-8", "deep", "long number"],
)
def test_what_is_not_json(file: Path, text: bytes) -> None:
    file.write_bytes(raw(None, bytes(8), text=text))
    with pytest.raises(BadJsonError):
        read_header(file)


def test_missing_and_pointer(file: Path) -> None:
    with pytest.raises(MissingFileError):
        read_header(file)
    with pytest.raises(MissingFileError):
        read_header(file.parent)  # a folder
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(LfsPointerError) as error:
        read_header(file)
    assert "git lfs pull" in error.value.remedy


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "model.safetensors"


@settings(max_examples=300, deadline=None)
@given(
    edits=st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), max_size=4),
    length=st.integers(0, len(GOOD)) | st.just(len(GOOD)),
)
def test_edited_bytes_raise_nothing_else(scratch: Path, edits: list[tuple[int, int]], length: int) -> None:
    content = bytearray(GOOD)
    for place, value in edits:
        content[place] = value
    scratch.write_bytes(content[:length])
    size = length
    try:
        tensors = read_header(scratch)
    except CheckpointError as error:
        assert error.rule.startswith("checkpoint.")
    else:  # whatever is accepted lies inside the file
        assert all(8 < t.offset <= t.offset + t.length <= size for t in tensors.values())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(
    header=st.dictionaries(
        st.text(max_size=3) | st.just("__metadata__"),
        JSON
        | st.fixed_dictionaries(
            {
                "dtype": JSON | st.sampled_from(["F32", "F4", "BF16"]),
                "shape": JSON | st.lists(st.integers(-1, 2**62), max_size=4),
                "data_offsets": JSON | st.lists(st.integers(0, 16), min_size=2, max_size=2),
            }
        ),
        max_size=3,
    )
)
def test_arbitrary_headers_raise_nothing_else(scratch: Path, header: dict[str, Any]) -> None:
    scratch.write_bytes(raw(header, bytes(16)))
    with suppress(CheckpointError):
        read_header(scratch)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Two shards, `a` and `b` in the first, `c` in the second."""
    (tmp_path / "m-1.safetensors").write_bytes(GOOD)
    (tmp_path / "m-2.safetensors").write_bytes(raw({"c": entry()}, bytes(8)))
    index(tmp_path, a="m-1.safetensors", b="m-1.safetensors", c="m-2.safetensors")
    return tmp_path


def index(folder: Path, **weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards(sharded: Path) -> None:
    tensors = read_folder(sharded)
    assert {name: t.file.name for name, t in tensors.items()} == {
        "a": "m-1.safetensors",
        "b": "m-1.safetensors",
        "c": "m-2.safetensors",
    }


def test_missing_shard(sharded: Path) -> None:
    (sharded / "m-2.safetensors").unlink()
    with pytest.raises(MissingFileError) as error:
        read_folder(sharded)
    assert error.value.place.endswith("m-2.safetensors")


def test_index_names_a_tensor_that_is_not_there(sharded: Path) -> None:
    index(sharded, a="m-1.safetensors", b="m-1.safetensors", c="m-2.safetensors", d="m-2.safetensors")
    with pytest.raises(ShardIndexError, match=r"index\.json:d"):
        read_folder(sharded)


def test_shard_holds_a_tensor_that_the_index_does_not_name(sharded: Path) -> None:
    index(sharded, a="m-1.safetensors", c="m-2.safetensors")
    with pytest.raises(ShardIndexError, match=r"m-1\.safetensors:b"):
        read_folder(sharded)


def test_a_tensor_in_two_shards(sharded: Path) -> None:
    (sharded / "m-2.safetensors").write_bytes(raw({"c": entry(), "a": entry(offsets=[8, 16])}, bytes(16)))
    with pytest.raises(ShardIndexError, match=r"m-2\.safetensors:a"):
        read_folder(sharded)


@pytest.mark.parametrize(
    "shard",
    ["../m-2.safetensors", "/etc/passwd", "sub/m-2.safetensors", "a\\b.safetensors", "c:x.safetensors", "",
     "..", ".hidden.safetensors", "m-2.bin", "m\0.safetensors", 3, None, ["m-2.safetensors"]],
)  # fmt: skip
def test_index_leaves_the_folder(sharded: Path, shard: Any) -> None:
    index(sharded, a="m-1.safetensors", b="m-1.safetensors", c=shard)
    with pytest.raises(ShardIndexError, match=r"index\.json:c"):
        read_folder(sharded)


@pytest.mark.parametrize("weight_map", [None, [], {}, "x"])
def test_index_without_tensors(sharded: Path, weight_map: Any) -> None:
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ShardIndexError):
        read_folder(sharded)


def test_index_beside_a_whole_file(sharded: Path) -> None:
    (sharded / "model.safetensors").write_bytes(GOOD)
    with pytest.raises(ShardIndexError, match="both"):
        read_folder(sharded)


def test_links_out_of_the_folder_are_followed_as_the_hub_cache_needs(sharded: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "model.safetensors").symlink_to(sharded / "m-1.safetensors")
    assert set(read_folder(snapshot)) == {"a", "b"}


def test_one_file_of_another_name(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(GOOD)
    assert set(read_folder(tmp_path)) == {"a", "b"}
    (tmp_path / "other.safetensors").write_bytes(GOOD)
    with pytest.raises(MissingFileError, match="2 safetensors files and no index"):
        read_folder(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "m.ckpt"])
def test_pickles_are_refused_unopened(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()  # opening it would raise IsADirectoryError
    with pytest.raises(PickleError) as error:
        read_folder(tmp_path)
    assert name in error.value.place
    assert "safetensors" in error.value.remedy


def test_empty_folder_and_none(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="no weights"):
        read_folder(tmp_path)
    with pytest.raises(MissingFileError, match="no such folder"):
        read_folder(tmp_path / "none")
