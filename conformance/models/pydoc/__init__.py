"""A small trained model: a Qwen3.5 text model that has read the documentation topics shipped with Python."""
