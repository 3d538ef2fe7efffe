"""What a user runs: the command line, the deployment spec, stages, reports."""
