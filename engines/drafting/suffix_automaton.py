"""Draft tokens from the sequence's own text: continue the way it continued when it last read like this.

The longest suffix of prompt and output that occurred before is kept at hand by a suffix automaton
(Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text"), which grows online in
amortised constant time a token. Each state stands for the substrings that end at the same places; its
suffix link leads to the longest suffix that also ends elsewhere. So the link of the state of the whole
text is the longest repeated suffix, and the tokens behind its latest earlier place are the draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Proposal", "SuffixAutomaton"]

# Keeping every suffix's latest place exact is a harder problem than matching (Larsson 2014, "Most recent
# match queries in on-line suffix trees"). Text has a handful of nested repeats; only a long run of one
# period has more than this, and then the shorter ones keep an older place.
MAX_NESTED = 64
ROOT = 0


@dataclass(frozen=True)
class Proposal:
    """Draft tokens and the length of the match that they continue (0: nothing matched)."""

    tokens: list[int]
    match: int


class SuffixAutomaton:
    """One sequence's text, and the longest of its suffixes that occurred before.

    n tokens make at most 2n states and 3n transitions.

    Args:
        min_match: tokens that must match before anything is proposed, at least 1.
    """

    def __init__(self, min_match: int = 1) -> None:
        self._min = max(min_match, 1)
        self._tokens: list[int] = []
        self._last = ROOT  # the state of the whole text
        # By state: transitions, suffix link, length of the longest substring, and the number of tokens
        # up to the end of its latest place, the present end of the text not counted.
        self._next: list[dict[int, int]] = [{}]
        self._link: list[int] = [ROOT]
        self._length: list[int] = [0]
        self._place: list[int] = [0]

    @property
    def match(self) -> int:
        """Length of the longest suffix that occurred before; 0: none."""
        return self._length[self._link[self._last]]

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens."""
        for token in tokens:
            self._settle()
            self._append(token)

    def propose(self, limit: int) -> Proposal:
        """At most `limit` tokens that followed the longest suffix when it last occurred."""
        match = self.match
        if match < self._min:
            return Proposal([], 0)
        start = self._place[self._link[self._last]]
        period = len(self._tokens) - start  # past the text's end, the stretch since the match repeats
        return Proposal([self._tokens[start + i % period] for i in range(limit)], match)

    def _settle(self) -> None:
        """The text is about to grow: its end becomes the latest place of all its suffixes."""
        end = len(self._tokens)
        state = self._link[self._last]
        for _ in range(MAX_NESTED):
            if state == ROOT:
                break
            self._place[state] = end
            state = self._link[state]

    def _append(self, token: int) -> None:
        """Blumer's extension step."""
        self._tokens.append(token)
        end = len(self._tokens)
        added = self._add_state({}, end, end)
        state = self._last
        while token not in self._next[state]:
            self._next[state][token] = added
            if state == ROOT:  # the token is new
                self._last = added
                return
            state = self._link[state]
        target = self._next[state][token]
        if self._length[target] != self._length[state] + 1:
            # The suffix ends where the target's longer substrings do not: it needs its own state.
            split = self._add_state(dict(self._next[target]), self._length[state] + 1, self._place[target])
            self._link[split] = self._link[target]
            self._link[target] = split
            while self._next[state].get(token) == target:
                self._next[state][token] = split
                if state == ROOT:
                    break
                state = self._link[state]
            target = split
        self._link[added] = target
        self._last = added

    def _add_state(self, transitions: dict[int, int], length: int, place: int) -> int:
        self._next.append(transitions)
        self._link.append(ROOT)
        self._length.append(length)
        self._place.append(place)
        return len(self._next) - 1
