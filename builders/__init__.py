"""From checkpoints to bundles: readers, pairing, graph emission, compilers."""
