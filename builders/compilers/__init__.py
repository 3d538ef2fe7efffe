"""Compilers: from the emitted graph to something a runtime loads. One file a compiler."""
