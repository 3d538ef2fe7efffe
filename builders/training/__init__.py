"""Training of drafters: the target is read once, all methods learn from that. Needs trtspec[train]."""
