"""From a bundle to a Triton model repository. Import rules apply from the first line on."""
