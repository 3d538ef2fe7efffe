"""Readers of published drafter heads: Medusa, EAGLE-1/2, EAGLE-3, SpecForge, speculators."""
