"""What both sides must agree on: messages, topics, text hashes, noise and sampling. No I/O."""
