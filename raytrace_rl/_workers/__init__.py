"""What `worker_groups` is made of: where workers run, how they are laid out, started, called in shards, and ended."""
