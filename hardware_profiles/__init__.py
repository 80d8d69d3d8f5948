"""Hardware profiles, one YAML file each."""
