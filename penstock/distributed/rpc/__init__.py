"""Remote calls between the trainer and the shards of the store."""
