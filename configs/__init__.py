"""Configuration: defaults, workloads, and what others claim."""
