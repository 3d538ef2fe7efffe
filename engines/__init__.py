"""What a built engine is and how it runs: bundles, verification, sampling, sessions, decoding."""
