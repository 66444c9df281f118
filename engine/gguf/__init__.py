"""GGUF files: checked directory, byte inventory, trunk-only copy and tokenizer."""
