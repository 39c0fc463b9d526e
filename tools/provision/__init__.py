"""The fleet's authority: who a board, a verifier, an operator or the broker is, and what the broker lets each say."""
