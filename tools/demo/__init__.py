"""`python -m tools.demo`: broker, long link, verifier and board as processes of this machine, and what they gain."""
