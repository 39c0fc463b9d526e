"""What a board, a link and a verifier can give together, from formulas: before anything is bought or deployed."""
