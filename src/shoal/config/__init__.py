"""Configuration: one strict schema, read from YAML with line numbers and checked before anything loads. No torch."""
