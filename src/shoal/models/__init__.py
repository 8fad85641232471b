"""Loading and running Hugging Face decoders: one model, one attention function, three modes."""
