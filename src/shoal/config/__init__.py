"""Configuration: one strict schema, read from YAML with line numbers, checked before anything loads. No torch."""
