"""The reduced vocabulary of an EAGLE-3 head: `d2t` and `t2d`, checked against each other and the target.

`d2t[i]` is an offset: draft token i stands for the target's token `i + d2t[i]`. `t2d[t]` says whether the
target's token t is in the draft vocabulary. A wrong map does not fail, it silently drafts other tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from builders.checkpoints.heads.source import HeadError, Source, check_rows, real_tokens
from builders.checkpoints.types import Checkpoint, TensorRef

__all__ = ["VocabularyMapError", "read_map"]

_MAX_TOKENS = 1 << 24


class VocabularyMapError(HeadError):
    """The map between draft and target vocabulary is missing, malformed or contradicts itself."""

    rule = "head.vocabulary-map"
    remedy_text = (
        "Export the head again with d2t and t2d from its training (int64 offsets: "
        "target id = draft id + d2t[draft id]); without the right map it drafts other tokens."
    )


def read_map(
    source: Source, lm_head_rows: int | None, target: Checkpoint
) -> tuple[npt.NDArray[np.int64] | None, tuple[str, ...]]:
    """The target's ids of all draft tokens, None for the full vocabulary; and warnings.

    Args:
        lm_head_rows: of the head's own lm_head; None: it has none.

    Raises:
        VocabularyMapError: d2t is needed and missing; a wrong dtype or shape; ids out of range or repeated;
            t2d and d2t disagree.
        OtherTargetError: a full vocabulary, or t2d, of another size than the target's.
    """
    d2t = source.tensors.get("d2t")
    marked, warnings = _marked(source, target)
    if d2t is None:
        return None, warnings + _full(source, lm_head_rows, marked, target)
    size = d2t.shape[0] if len(d2t.shape) == 1 else 0
    if d2t.dtype != "I64" or not 0 < size <= _MAX_TOKENS:
        raise _error(source, "d2t", f"{d2t.dtype} {list(d2t.shape)}", "I64 [draft vocabulary]")
    if lm_head_rows not in (None, size):
        raise _error(source, "d2t", f"{size} entries", f"{lm_head_rows}, one a row of lm_head.weight")
    offsets = _values(d2t, np.dtype(np.int64))
    places = np.arange(size, dtype=np.int64)
    real = real_tokens(target)
    beyond = np.flatnonzero((offsets < -places) | (offsets >= real - places))
    if beyond.size:
        i = int(beyond[0])
        raise _error(
            source,
            f"d2t[{i}]",
            f"{int(offsets[i])}: draft token {i} would be the target's token {i + int(offsets[i])}"
            f" ({beyond.size} such)",
            f"a target token of 0 … {real - 1}",
        )
    ids = places + offsets
    found, counts = np.unique(ids, return_counts=True)
    if found.size < size:
        twice = int(found[counts.argmax()])
        which = np.flatnonzero(ids == twice)[:4].tolist()
        raise _error(source, "d2t", f"draft tokens {which} all stand for token {twice}", "each token once")
    if marked is not None:
        _check_t2d(source, marked, found)
    else:
        warnings += ("d2t without t2d: nothing confirms the map",)
    if marked is None and size < real and not offsets.any():
        warnings += (
            f"d2t holds only zeros, so that the draft vocabulary is the first {size} tokens: "
            "some exports lose the map this way",
        )
    if size >= real and np.array_equal(ids, places):
        return None, warnings  # the full vocabulary in its own order
    return ids, warnings


def _full(
    source: Source, lm_head_rows: int | None, marked: npt.NDArray[np.int64] | None, target: Checkpoint
) -> tuple[str, ...]:
    """Without d2t: the head must have the target's vocabulary."""
    claimed = source.config.get("draft_vocab_size")
    real = real_tokens(target)
    if marked is not None and marked.size < real:
        raise _error(source, "d2t", "no d2t, and t2d leaves tokens out", "d2t beside t2d")
    if lm_head_rows is None:
        # Nothing but the config could say so, and a head that is trained on a reduced vocabulary has both.
        if isinstance(claimed, int) and claimed < real:
            raise _error(
                source,
                "d2t",
                f"no d2t and no lm_head.weight, and config.json says draft_vocab_size = {claimed}",
                "d2t, for the target's lm_head to be shared row by row",
            )
        return ()
    if lm_head_rows < real and claimed == lm_head_rows:
        raise _error(
            source, "d2t", f"no d2t, and lm_head.weight has {lm_head_rows} rows", f"d2t [{lm_head_rows}]"
        )
    return check_rows(source, "lm_head.weight", lm_head_rows, target)


def _check_t2d(source: Source, marked: npt.NDArray[np.int64], ids: npt.NDArray[np.int64]) -> None:
    """That t2d marks the tokens `ids` (sorted) and no others."""
    if marked.size != ids.size:
        raise _error(
            source, "t2d", f"it marks {marked.size} tokens", f"{ids.size}, as many as d2t has entries"
        )
    if not np.array_equal(marked, ids):
        i = int(np.flatnonzero(marked != ids)[0])
        raise _error(
            source,
            "t2d",
            f"it marks token {int(marked[i])} where d2t leads to token {int(ids[i])}",
            "the tokens that d2t leads to",
        )


def _marked(source: Source, target: Checkpoint) -> tuple[npt.NDArray[np.int64] | None, tuple[str, ...]]:
    """The tokens that t2d marks, sorted; None without t2d."""
    t2d = source.tensors.get("t2d")
    if t2d is None:
        return None, ()
    if t2d.dtype != "BOOL" or len(t2d.shape) != 1:
        raise _error(source, "t2d", f"{t2d.dtype} {list(t2d.shape)}", "BOOL [target vocabulary]")
    warnings = check_rows(source, "t2d", t2d.shape[0], target)
    return np.flatnonzero(_values(t2d, np.dtype(np.bool_))), warnings


def _values(tensor: TensorRef, element: np.dtype[Any]) -> npt.NDArray[Any]:
    """A small tensor's values."""
    count = tensor.length // element.itemsize
    return np.fromfile(tensor.file, element, count, offset=tensor.offset)


def _error(source: Source, name: str, found: str, allowed: str) -> VocabularyMapError:
    return VocabularyMapError(found, place=source.at(name), allowed=allowed)
