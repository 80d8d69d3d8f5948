"""The systems that moebench ships, one folder each."""
