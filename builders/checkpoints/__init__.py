"""Checkpoint readers, one file a format. Headers are evidence, config files are claims."""
