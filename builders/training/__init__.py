"""Training of drafters: what the target says is read once; all methods learn from that. Needs trtspec[train]."""
