"""What the demo asks."""

PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that checks whether a string is a palindrome, and explain it.",
    "List five things that a small computer at home can be used for.",
)
