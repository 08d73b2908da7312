"""Configuration: typed sections, presets in YAML, and every field as a flag."""
