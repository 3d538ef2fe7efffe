"""Sessions: run the fused step of a bundle on some device. One protocol, one file a runtime."""
