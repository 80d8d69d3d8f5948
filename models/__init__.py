"""Model geometries (YAML) and the embedded model."""
