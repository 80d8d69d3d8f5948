"""Configuration: defaults, workloads, protocols."""
