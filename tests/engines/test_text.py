"""Detokenisation of growing outputs, stop texts, chat templates."""

from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engines.errors import BundleError
from engines.text import ChatTemplateError, Detokenizer, StopTexts, TextCodec

TEXT = "naïve 🙂 日本語 café – “quoted” 👩‍👩‍👧 end"


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    """One token a byte: every non-ASCII character spans tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": {"content": "<s>"}, "eos_token": "</s>"}')
    (folder / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no bad') }}"
        "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
    )
    return TextCodec(folder)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_streamed_pieces_are_whole_characters_and_add_up(codec: TextCodec, size: int) -> None:
    tokens = codec.encode(TEXT)
    stream = Detokenizer(codec)
    pieces = [stream.push(tokens[i : i + size]) for i in range(0, len(tokens), size)]
    pieces.append(stream.flush())
    assert "".join(pieces) == TEXT
    assert all("\ufffd" not in piece for piece in pieces)


def test_an_output_cut_inside_a_character_is_flushed(codec: TextCodec) -> None:
    stream = Detokenizer(codec)
    assert stream.push(codec.encode("ab🙂")[:-1]) == ""
    assert stream.flush() == "ab\ufffd"


@given(
    st.text(alphabet="abc", max_size=30),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3),
)
def test_stop_texts_cut_where_a_search_of_the_whole_text_would(text: str, stops: list[str]) -> None:
    held = StopTexts(stops)
    shown = "".join(held.push(c) for c in text) + held.flush()
    # Character by character, the stop whose end comes first ends the output.
    ends = [(text.index(s) + len(s), text.index(s)) for s in stops if s in text]
    assert held.hit == bool(ends)
    if ends:
        first = min(end for end, _ in ends)
        assert shown == text[: min(start for end, start in ends if end == first)]
    else:
        assert shown == text


def test_stop_text_across_pieces_is_never_shown() -> None:
    held = StopTexts(["END"])
    assert [held.push(p) for p in ("a E", "N", "D b", "c")] == ["a ", "", "", ""]
    assert held.hit


def test_chat_template_is_rendered_with_special_tokens(codec: TextCodec) -> None:
    ids = codec.encode_chat([{"role": "user", "content": "hi"}])
    assert codec.decode(ids) == "<s>[user]hi[a]"


def test_chat_template_can_refuse(codec: TextCodec) -> None:
    with pytest.raises(ChatTemplateError, match="no bad"):
        codec.encode_chat([{"role": "bad", "content": ""}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.__class__.__base__ }}",
        "{% for i in range(10) %}{{ messages.append(1) }}{% endfor %}",
        "{{ 1 + 'a' }}",
        "{{ 1 // 0 }}",
        "{{ range(10 ** 9) }}",
    ],
)
def test_chat_template_cannot_reach_python(codec: TextCodec, template: str) -> None:
    hostile = TextCodec.__new__(TextCodec)
    hostile.__dict__.update(codec.__dict__, chat_template=template)
    with pytest.raises(ChatTemplateError):
        hostile.encode_chat([{"role": "user", "content": "x"}])


def test_missing_and_broken_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no usable tokenizer"):
        TextCodec(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BundleError, match="no usable tokenizer"):
        TextCodec(tmp_path)


def test_templates_render_as_transformers_does(codec: TextCodec) -> None:
    other = TextCodec.__new__(TextCodec)
    template = "{% for m in messages %}{{ m | tojson }}{% break %}{% endfor %}"
    other.__dict__.update(codec.__dict__, chat_template=template)
    assert other.decode(other.encode_chat([{"role": "é", "content": "<b>"}] * 2)) == (
        '{"role": "é", "content": "<b>"}'
    )
