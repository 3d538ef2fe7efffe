"""The drafter of method `ngram`: prompt lookup (Saxena 2023) over a suffix automaton."""

from __future__ import annotations

from engines.drafting.suffix_automaton import Proposal, SuffixAutomaton

__all__ = ["NgramIndex", "Proposal"]


class NgramIndex(SuffixAutomaton):
    """A suffix automaton; matches have no longest length, `max_match` is ignored."""

    def __init__(self, min_match: int, max_match: int) -> None:
        super().__init__(min_match)
