"""n-gram drafting (prompt lookup, Saxena 2023): continue the way the text continued before.

The last tokens are looked up among everything the sequence has seen, longest match first; the
tokens that followed the match's most recent earlier place are the draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["NgramIndex", "Proposal"]


@dataclass(frozen=True)
class Proposal:
    """Draft tokens and the length of the match that they continue (0: nothing matched)."""

    tokens: list[int]
    match: int


class NgramIndex:
    """One sequence's n-grams of `min_match` … `max_match` tokens, each with its latest place.

    Appending a token costs O(max_match); a proposal costs as much.
    """

    def __init__(self, min_match: int, max_match: int) -> None:
        self._min = min_match
        self._max = max_match
        self._tokens: list[int] = []
        # n-gram -> the place behind its latest occurrence, and behind the one before that
        self._places: dict[tuple[int, ...], tuple[int, int]] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens."""
        for token in tokens:
            self._tokens.append(token)
            end = len(self._tokens)
            for size in range(self._min, min(self._max, end) + 1):
                gram = tuple(self._tokens[end - size :])
                latest = self._places.get(gram, (0, 0))[0]
                self._places[gram] = (end, latest)

    def propose(self, limit: int) -> Proposal:
        """At most `limit` tokens that followed the longest suffix when it last occurred."""
        end = len(self._tokens)
        for size in range(min(self._max, end), self._min - 1, -1):
            place = self._places.get(tuple(self._tokens[end - size :]))
            if place is None or place[1] == 0:
                continue
            start = place[1]
            period = end - start  # past the text's end, the draft repeats the stretch since the match
            return Proposal([self._tokens[start + i % period] for i in range(limit)], size)
        return Proposal([], 0)
