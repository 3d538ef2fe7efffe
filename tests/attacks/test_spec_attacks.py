"""Deployment specs made to do harm: any text at all gives a spec or one clear error, soon."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from engines.errors import TrtspecError
from pipelines.spec import DeploymentSpec, SpecError, load_spec

GOOD = "name: demo\ntarget: {checkpoint: m}\n"
KEYS = ("name", "target", "checkpoint", "drafter", "method", "ngram", "gamma", "limits", "compile", "lane")
SYNTAX = (
    *(": ", ", ", "\n", "\n  ", "\n- ", "{", "}", "[", "]", "? ", "| ", "> ", "'", '"', "#", "\t", "\\"),
    *("---\n", "...\n", "%YAML 1.1\n", "%TAG ! x\n", "&a ", "*a", "<<", "=", "\x85", "\u2028", "\ufeff", "é"),
    *("!!int ", "!!float ", "!!bool ", "!!null ", "!!binary ", "!!timestamp ", "!!set ", "!!omap ", "!x "),
)
VALUES = (
    "4",
    "-1",
    "1e999",
    ".nan",
    "-.inf",
    "0x",
    "0b2",
    "0o9",
    "1:2:3",
    "2026-13-45",
    "~",
    "yes",
    "9" * 25,
)


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(KEYS + SYNTAX + VALUES) | st.text(max_size=3), max_size=16), st.booleans())
@example(["limits", ": ", "!!int ", "'", "'"], True)
def test_any_text_gives_a_spec_or_one_error(tmp_path: Path, parts: list[str], begins_well: bool) -> None:
    file = tmp_path / "spec.yaml"
    text = "".join(parts)
    file.write_bytes(((GOOD if begins_well else "") + text).encode("utf-8", "surrogatepass"))
    try:
        assert isinstance(load_spec(file), DeploymentSpec)
    except TrtspecError as error:
        assert error.exit_code == 2
        assert error.place.startswith(str(file))
        assert error.found
        assert error.remedy


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b]\n", "an alias"),
        ("a: &a [*a]\n", "an alias"),
        (GOOD + "drafter: {<<: [{method: ngram}, {gamma: 3}]}\n", "unknown key '<<'"),
        (GOOD + "drafter: " + "[" * 20_000, "levels"),
        (GOOD + "drafter: " + "{a: " * 10_000, "levels"),
        (GOOD + "? " * 20_000, "levels"),
        (GOOD + "".join(f"key{i}: 1\n" for i in range(4_000)), "unknown key 'key0'"),
        (GOOD + "drafter: {gamma: " + "9" * 60_000 + "}\n", "digits"),
    ],
    ids=["laughs", "itself", "merge", "lists", "mappings", "keys of keys", "many keys", "digits"],
)
def test_bombs(tmp_path: Path, text: str, says: str) -> None:
    """Each is refused by the rule against it, not later by luck: that would take minutes."""
    file = tmp_path / "spec.yaml"
    file.write_text(text)
    tracemalloc.start()
    try:
        with pytest.raises(TrtspecError, match=says) as caught:
            load_spec(file)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.exit_code == 2
    assert peak < 64 << 20


@pytest.mark.parametrize(
    "tag", ["object/apply:os.mkdir", "object/new:os.mkdir", "name:os.mkdir", "module:os"]
)
def test_tags_run_nothing(tmp_path: Path, tag: str) -> None:
    witness = tmp_path / "executed"
    file = tmp_path / "spec.yaml"
    file.write_text(GOOD + f"drafter: !!python/{tag} ['{witness}']\n")
    with pytest.raises(SpecError):
        load_spec(file)
    assert not witness.exists()


@pytest.mark.parametrize("name", ["..", ".", "", "a/b", "/etc", "a\x00b", "-rf", "a\n", "~", "é", "x" * 65])
def test_names_cannot_lead_anywhere(tmp_path: Path, name: str) -> None:
    """A name becomes a folder: it must not leave the output folder, nor look like an option."""
    file = tmp_path / "spec.yaml"
    escaped = "".join(f"\\u{ord(c):04x}" for c in name)
    file.write_text(f'name: "{escaped}"\ntarget: {{checkpoint: m}}\n')
    with pytest.raises(SpecError) as caught:
        load_spec(file)
    assert "name" in caught.value.place
