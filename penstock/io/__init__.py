"""Files: durable writes, safe reads, failpoints, safetensors headers."""
