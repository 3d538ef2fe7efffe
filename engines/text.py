"""Text in, text out: tokenizer, chat template, and detokenisation of a growing output."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from engines.errors import BundleError, UsageError

__all__ = ["Detokenizer", "StopTexts", "TextCodec"]

REPLACEMENT = "\ufffd"  # what a tokenizer prints for an incomplete character


class ChatTemplateError(UsageError):
    """The chat template refuses the messages."""

    rule = "request.chat-template"
    remedy_text = "Change the messages, or send the prompt as it is (--raw)."


class TextCodec:
    """A bundle's tokenizer and chat template.

    Args:
        folder: holds `tokenizer.json` and, optionally, `tokenizer_config.json` and `chat_template.jinja`.

    Raises:
        BundleError: a file is missing or no tokenizer.
    """

    def __init__(self, folder: Path) -> None:
        file = folder / "tokenizer.json"
        try:
            self.tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:
            raise BundleError(f"no usable tokenizer: {error}", place=file) from error
        config = folder / "tokenizer_config.json"
        self._config: Mapping[str, Any] = json.loads(config.read_text("utf-8")) if config.exists() else {}
        template = folder / "chat_template.jinja"
        self.chat_template = template.read_text("utf-8") if template.exists() else None

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` as it stands; special tokens written out in it are recognised."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, the assistant's turn opened.

        Raises:
            ChatTemplateError: there is no template, or it refuses the messages.
        """
        if self.chat_template is None:
            raise ChatTemplateError("this model has no chat template", place="messages")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )

        def refuse(message: str) -> None:
            raise TemplateError(message)

        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = time.strftime
        # As transformers renders it: no HTML escapes, and letters as they are.
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(
            value, ensure_ascii=False, indent=indent
        )
        special = {k: _content(v) for k, v in self._config.items() if k.endswith("_token")}
        try:
            text = environment.from_string(self.chat_template).render(
                messages=list(messages), add_generation_prompt=True, **special
            )
        except (TemplateError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise ChatTemplateError(str(error), place="chat_template.jinja") from error
        return self.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of a finished output; special tokens are left out."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))


def _content(value: Any) -> Any:
    """A special token is stored as its text or as a record of it."""
    return value.get("content") if isinstance(value, dict) else value


class Detokenizer:
    """Turns tokens into text as they come: whole characters only, nothing said twice.

    A token may hold part of a character, and its text may depend on its neighbours; so the text of
    a short stretch is decoded with and without the new tokens, and the difference is handed out.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._tokens: list[int] = []
        self._context = 0  # start of the stretch
        self._given = 0  # tokens before this one have been handed out

    def push(self, tokens: Sequence[int]) -> str:
        """Text that became certain with `tokens`."""
        self._tokens += tokens
        before = self._codec.decode(self._tokens[self._context : self._given])
        after = self._codec.decode(self._tokens[self._context :])
        if after.endswith(REPLACEMENT):
            return ""
        self._context, self._given = self._given, len(self._tokens)
        return after[len(before) :]

    def flush(self) -> str:
        """What is left at the end, be it an incomplete character."""
        before = self._codec.decode(self._tokens[self._context : self._given])
        after = self._codec.decode(self._tokens[self._context :])
        self._context = self._given = len(self._tokens)
        return after[len(before) :]


class StopTexts:
    """Holds text back while it could still become a stop text, and ends at the first one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [s for s in stops if s]
        self._held = ""
        self.hit = False

    def push(self, text: str) -> str:
        """Text that may be shown; after a stop text was found, nothing more."""
        if self.hit:
            return ""
        self._held += text
        places = [(self._held.index(s), s) for s in self._stops if s in self._held]
        if places:
            self.hit = True
            shown, self._held = self._held[: min(places)[0]], ""
            return shown
        keep = max((_overlap(self._held, s) for s in self._stops), default=0)
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return shown

    def flush(self) -> str:
        """What was held back when the output ended."""
        shown, self._held = self._held, ""
        return "" if self.hit else shown


def _overlap(text: str, stop: str) -> int:
    """The longest end of `text` that is a proper beginning of `stop`."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
