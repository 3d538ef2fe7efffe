"""Hostile drafter heads: pickles that carry code, files that swell, lie, stop early or were flipped."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from heads_zoo import edit_head, make_deep_model, make_eagle3, make_medusa, make_speculators, store_fp8
from transformers import PreTrainedModel

import builders.checkpoints.heads.values as values_module
from builders.checkpoints.heads.convert import convert_head, needs_conversion
from builders.checkpoints.heads.reader import is_head, read_head
from builders.checkpoints.heads.values import check_values
from builders.checkpoints.reader import read_checkpoint
from builders.checkpoints.types import Checkpoint
from engines.errors import CheckpointError, TrtspecError


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_deep_model()


@pytest.fixture(scope="module")
def target(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return read_checkpoint(zoo.save(model, tmp_path_factory.mktemp("target")))


def refused(file: Path, out: Path) -> TrtspecError:
    """The error of a conversion that must fail and leave nothing."""
    before = set(out.parent.iterdir())
    with pytest.raises(TrtspecError) as caught:
        convert_head(file, out)
    assert set(out.parent.iterdir()) == before
    assert caught.value.remedy
    return caught.value


# -- code -------------------------------------------------------------------------------------------


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, call: Callable[..., object], *arguments: object) -> None:
        self.parts = (call, arguments)

    def __reduce__(self) -> Any:
        return self.parts


def payloads(marker: Path) -> dict[str, Any]:
    return {
        "os.system": Payload(os.system, f"touch {marker}"),
        "eval": Payload(eval, f"open({str(marker)!r}, 'w').close()"),
        "Path.touch": Payload(Path.touch, marker),
        "import": Payload(__import__, "antigravity"),
        "torch.load": Payload(torch.load, str(marker)),
        "in a dict": {"0.0.linear.weight": Payload(os.system, f"touch {marker}")},
        "among tensors": {"a": torch.ones(2), "b": [torch.ones(2), Payload(os.mkdir, str(marker))]},
    }


def bare_pickle(file: Path, content: object) -> None:
    file.write_bytes(pickle.dumps(content, protocol=2))


def zipped(file: Path, content: object) -> None:
    torch.save(content, file)


def legacy(file: Path, content: object) -> None:
    torch.save(content, file, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("kind", list(payloads(Path("x"))))
@pytest.mark.parametrize(
    ("write", "name"),
    [(bare_pickle, "head.pth"), (zipped, "medusa_lm_head.pt"), (legacy, "pytorch_model.bin")],
)
def test_code_in_a_pickle_does_not_run(
    kind: str, write: Callable[[Path, object], None], name: str, tmp_path: Path, target: Checkpoint
) -> None:
    marker, folder = tmp_path / "it-ran", tmp_path / "head"
    folder.mkdir()
    write(folder / name, payloads(marker)[kind])
    (folder / "config.json").write_text("{}")
    assert needs_conversion(folder)
    with pytest.raises(CheckpointError):
        read_head(folder, target)
    with pytest.raises(CheckpointError):
        is_head(folder)
    error = refused(folder, tmp_path / "out")
    assert error.rule in ("head.code-in-pickle", "head.bad-pickle")
    if write is not bare_pickle or kind != "among tensors":
        assert error.rule == "head.code-in-pickle"
        assert error.found.startswith("it wants to call ")
    assert "trusted source" not in str(error)
    assert not marker.exists()


def test_the_payload_would_run(tmp_path: Path) -> None:
    """Or the test above would prove nothing."""
    marker = tmp_path / "it-ran"
    zipped(tmp_path / "a.pt", payloads(marker)["os.system"])
    torch.load(tmp_path / "a.pt", weights_only=False)
    assert marker.exists()


# -- pickles that are no state dict ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ([torch.ones(2)], "a list"),
        ({}, "a dict"),
        (torch.ones(2), "a Tensor"),
        ({1: torch.ones(2)}, "1: a Tensor"),
        ({"a": {"b": torch.ones(2)}}, "'a': a dict"),
        ({"a": 3}, "'a': a int"),
        ({"a": torch.ones(2, dtype=torch.float64)}, "torch.float64"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, "torch.complex64"),
        ({"a": torch.ones(2, 2).to_sparse()}, "torch.sparse_coo"),
        ({"a": torch.ones(2, device="meta")}, "meta"),
        ({f"t{i}": 0 for i in range(5000)}, "a dict"),
    ],
)
def test_no_state_dict(content: object, found: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "head.pt")
    error = refused(tmp_path / "head.pt", tmp_path / "out")
    assert error.rule == "head.bad-pickle" and found in error.found


def test_a_tensor_larger_than_its_storage(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1).expand(1 << 40)}, tmp_path / "head.pt")
    assert (tmp_path / "head.pt").stat().st_size < 5000
    error = refused(tmp_path / "head.pt", tmp_path / "out")
    assert error.rule == "head.bad-pickle" and "on 4 bytes" in error.found


def test_many_names_for_one_storage(tmp_path: Path) -> None:
    shared = torch.zeros(100_000)
    torch.save({f"t{i}": shared for i in range(1000)}, tmp_path / "head.pt")
    error = refused(tmp_path / "head.pt", tmp_path / "out")
    assert error.rule == "head.bad-pickle" and "would become 400,000,000" in error.found


def test_an_archive_that_swells(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1 << 20)}, tmp_path / "plain.pt")
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as plain,
        zipfile.ZipFile(tmp_path / "head.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for entry in plain.infolist():
            packed.writestr(entry.filename, plain.read(entry))
    assert (tmp_path / "head.pt").stat().st_size < 20_000
    error = refused(tmp_path / "head.pt", tmp_path / "out")
    assert error.rule == "head.bad-pickle" and "compressed" in error.found


@pytest.mark.parametrize("content", [b"", b"\x80", b"garbage" * 100, b"PK\x03\x04" + bytes(60), bytes(4096)])
def test_garbage(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "head.pt").write_bytes(content)
    assert refused(tmp_path / "head.pt", tmp_path / "out").rule == "head.bad-pickle"


def test_lfs_pointers(tmp_path: Path, model: PreTrainedModel, target: Checkpoint) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (tmp_path / "head.pt").write_text(pointer)
    assert refused(tmp_path / "head.pt", tmp_path / "out").rule == "checkpoint.lfs-pointer"
    folder = make_medusa(model, tmp_path / "m")
    (folder / "medusa_lm_head.safetensors").write_text(pointer)
    for call in (needs_conversion, is_head, lambda path: read_head(path, target)):
        with pytest.raises(CheckpointError) as caught:
            call(folder)
        assert caught.value.rule == "checkpoint.lfs-pointer"
        assert "git lfs pull" in caught.value.remedy


# -- files cut short, too long, flipped --------------------------------------------------------------


@pytest.mark.parametrize("write", [zipped, legacy])
def test_pickles_cut_short(write: Callable[[Path, object], None], tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.pt", tmp_path / "cut.pt"
    write(whole, {"0.0.linear.weight": torch.ones(8, 8), "0.0.linear.bias": torch.ones(8)})
    content = whole.read_bytes()
    for length in range(0, len(content) - 1, 23):
        cut.write_bytes(content[:length])
        # The older format may break off within the name of what is called.
        rule = refused(cut, tmp_path / "out").rule
        assert rule == "head.bad-pickle" or (write is legacy and rule == "head.code-in-pickle")


@pytest.mark.parametrize("write", [zipped, legacy])
def test_flipped_pickles(write: Callable[[Path, object], None], tmp_path: Path) -> None:
    """Whatever a byte does, the result is a conversion or one of our errors."""
    whole, flipped = tmp_path / "whole.pt", tmp_path / "flipped.pt"
    write(whole, {"0.0.linear.weight": torch.ones(8, 8), "0.0.linear.bias": torch.ones(8)})
    content, rng, outcomes = whole.read_bytes(), random.Random(0), {"read": 0, "refused": 0}
    for _ in range(80):
        broken = bytearray(content)
        broken[rng.randrange(min(len(broken), 1200))] = rng.randrange(256)
        flipped.write_bytes(broken)
        try:
            convert_head(flipped, tmp_path / "out")
            outcomes["read"] += 1
        except TrtspecError:
            outcomes["refused"] += 1
    assert outcomes["refused"] > 10 and outcomes["read"] > 10


def test_flipped_heads(tmp_path: Path, model: PreTrainedModel, target: Checkpoint) -> None:
    folders = [make_eagle3(model, tmp_path / "a"), make_speculators(model, tmp_path / "b", qk_norm=True)]
    folders += [make_medusa(model, tmp_path / "c"), store_fp8(make_eagle3(model, tmp_path / "d"))]
    rng = random.Random(1)
    for folder in folders:
        for file in folder.iterdir():
            content = file.read_bytes()
            for _ in range(40):
                broken = bytearray(content)
                for _ in range(rng.choice((1, 1, 4))):
                    broken[rng.randrange(min(len(broken), 2500))] = rng.choice(b'0129[]{}",:-.etFIB\xff')
                file.write_bytes(broken)
                try:
                    if needs_conversion(folder):
                        convert_head(folder, tmp_path / "out")
                    else:
                        read_head(folder, target)
                except TrtspecError as error:
                    assert error.place and error.remedy
            file.write_bytes(content)


@pytest.mark.parametrize("length", [0, 4, 8, 100, -1])
def test_safetensors_cut_short(
    length: int, tmp_path: Path, model: PreTrainedModel, target: Checkpoint
) -> None:
    folder = make_eagle3(model, tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(CheckpointError) as caught:
        read_head(folder, target)
    assert caught.value.rule == "checkpoint.bad-header"


def test_safetensors_with_more_behind(tmp_path: Path, model: PreTrainedModel, target: Checkpoint) -> None:
    folder = make_eagle3(model, tmp_path)
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(CheckpointError) as caught:
        read_head(folder, target)
    assert caught.value.rule == "checkpoint.bad-header"


def test_a_config_that_is_too_long(tmp_path: Path, model: PreTrainedModel, target: Checkpoint) -> None:
    folder = edit_head(make_eagle3(model, tmp_path), note="x" * (1 << 20))
    with pytest.raises(CheckpointError, match="too long"):
        read_head(folder, target)


def test_a_config_that_is_nested_without_end(
    tmp_path: Path, model: PreTrainedModel, target: Checkpoint
) -> None:
    folder = make_eagle3(model, tmp_path)
    (folder / "config.json").write_text('{"a":' + "[" * 200_000 + "]" * 200_000 + "}")
    with pytest.raises(CheckpointError) as caught:
        read_head(folder, target)
    assert caught.value.rule == "checkpoint.bad-json"


@pytest.mark.parametrize(
    "shard", ["../model.safetensors", "/etc/passwd.safetensors", "a/../../b.safetensors"]
)
def test_an_index_that_leaves_its_folder(
    shard: str, tmp_path: Path, model: PreTrainedModel, target: Checkpoint
) -> None:
    make_eagle3(model, tmp_path)
    folder = tmp_path / "inner"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": shard}}))
    with pytest.raises(CheckpointError) as caught:
        read_head(folder, target)
    assert caught.value.rule == "checkpoint.bad-index"


def test_numbers_without_measure(tmp_path: Path, model: PreTrainedModel, target: Checkpoint) -> None:
    folder = make_eagle3(model, tmp_path)
    file = folder / "config.json"
    content = json.loads(file.read_text())
    for key in ("num_attention_heads", "head_dim", "rms_norm_eps", "rope_theta", "max_position_embeddings"):
        for value in (10**40, -1, 0, 1.5e300, "1", [1], {}, True):
            file.write_text(json.dumps({**content, key: value}))
            with pytest.raises(CheckpointError):
                read_head(folder, target)
    file.write_text(json.dumps({**content, "rope_theta": float("nan")}))
    with pytest.raises(CheckpointError):
        read_head(folder, target)


@pytest.mark.parametrize(
    "name", ["999999999.0.linear.weight", "0.999999999.linear.weight", "99999.99999.weight"]
)
def test_a_tensors_name_that_counts_far(
    name: str, tmp_path: Path, model: PreTrainedModel, target: Checkpoint
) -> None:
    """What is expected of a head is listed by name: no more than the file can hold."""
    folder = edit_head(make_medusa(model, tmp_path), lambda t: t.update({name: torch.zeros(2, 2)}))
    started = time.perf_counter()
    with pytest.raises(CheckpointError):
        read_head(folder, target)
    assert time.perf_counter() - started < 2


def test_values_are_read_in_pieces(
    tmp_path: Path, model: PreTrainedModel, target: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head of any size needs the memory of one piece."""
    head = read_head(make_eagle3(model, tmp_path), target)
    sizes: list[int] = []

    def spy(tensor: Any, element: Any) -> Any:
        for piece in real(tensor, element):
            sizes.append(piece.size)
            yield piece

    real = values_module.pieces
    monkeypatch.setattr(values_module, "PIECE", 512)
    monkeypatch.setattr(values_module, "pieces", spy)
    check_values(head)
    assert max(sizes) == 512 and sum(sizes) == head.num_parameters


def test_nothing_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """PyTorch's advice to load the file without safety must not reach the user."""
    buffer = io.BytesIO()
    pickle.dump(Payload(os.getcwd), buffer)
    (tmp_path / "head.pt").write_bytes(buffer.getvalue())
    refused(tmp_path / "head.pt", tmp_path / "out")
    assert capfd.readouterr() == ("", "")
